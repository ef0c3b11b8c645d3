"""The report of a run: report.json, and report.html, a page for people. Importing it does not import torch."""

from ligertune.report.make_report import Report, Throughput, make_report, throughput, versions
from ligertune.report.run_page import batch_words, loss_unit, model_title, write_run_report

__all__ = [
    "Report", "Throughput", "batch_words", "loss_unit", "make_report", "model_title", "throughput", "versions",
    "write_run_report",
]  # fmt: skip
