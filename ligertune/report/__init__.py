"""The report of a run: report.json, and report.html, a page for people."""

from ligertune.report.make_report import Report, Throughput, make_report, throughput
from ligertune.report.provenance import versions

__all__ = ["Report", "Throughput", "make_report", "throughput", "versions"]
