"""scripts/bench kernels --forms: time and memory of the forms of ops in kernel_forms.py.

Each form runs forward + backward next to the same form in eager torch and in torch.compile. Its outputs and gradients
are compared with float64 before the times are taken; a form that is wrong is printed as failed. The floor is the bytes
of arguments and results, each moved once per direction, at the copy rate of this GPU.
"""

from __future__ import annotations

import argparse
import math
import time

from benchmarks import pages
from benchmarks.pages import GIB
from benchmarks.tables.kernel_forms import FORMS, Form, benchmark_of
from ligertune.bench.case import Case
from ligertune.bench.kernel_check import BOUNDS
from ligertune.bench.measure import BenchSetup, Row, bench

GOAL = 0.88  # share of the floor on an H100
FORM_SHARE_AXIS = (
    "share of the floor, % (more is better)\nfloor: time to copy the arguments and results once,\nat the measured copy "
    "rate; faster than that: over 100"
)
BUDGET = 100.0  # seconds after which no further form starts


def problem_of(row: Row) -> str | None:
    """Return why a row of ours does not count: an exception, or a result that is wrong."""
    bound = BOUNDS[row.case.dtype]
    if row.failure or row.error is None:
        return row.failure or "not compared with float64"
    if not row.error <= bound:  # NaN is wrong, too
        worst = max(row.errors, key=lambda name: (math.isnan(row.errors[name]), row.errors[name]))
        return f"{worst} differs from float64 by {row.error:.1e}, at most {bound:.0e} is expected"
    return None


def measure(forms: list[Form], here: BenchSetup, options: argparse.Namespace, end: float) -> list[list[Row]]:
    """Return the rows of each form that starts before `end`, on the clock of time.perf_counter."""
    found = []
    for form in forms:
        if time.perf_counter() > end:
            print(f"not run, the time is spent: {form.label}", flush=True)
            continue
        benchmark = benchmark_of(form)
        case = Case(form.label, (benchmark.cpu_sizes if options.small else benchmark.sizes)[0], here.dtype)
        (rows,) = bench([case], here, benchmarks={form.label: benchmark}, modes=("both",),
                        chosen=lambda provider: provider.name not in options.without)  # fmt: skip
        print(f"{form.label}: {_milliseconds(rows[0]) or 0:.3f} ms", flush=True)
        found.append(rows)
    return found


def _milliseconds(row: Row | None) -> float | None:
    return 1e3 * row.device["both"].median if row and "both" in row.device else None


def rows_of_table(found: list[list[Row]]) -> list[dict]:
    """Return a row of the table per form. One that fails has its reason in place of the verdict."""
    table = []
    for rows in found:
        named = {row.provider: row for row in rows}
        ours = named["ours"]
        problem = problem_of(ours)
        row = {"form": ours.case.op, "size": ours.case.label}
        if problem is None:
            share = ours.share("both")
            peak = None if ours.peak_bytes is None else ours.peak_bytes / GIB
            row |= {"ms": _milliseconds(ours), "share": 100.0 * share, "gib": peak}
            row |= {"goal": "met" if share >= GOAL else "missed"}
        row |= {"eager": _milliseconds(named.get("eager")), "compile": _milliseconds(named.get("torch.compile"))}
        table.append(row if problem is None else row | {"goal": f"failed: {problem}"})
    return table


COLUMNS = [
    ["form", "form", ""], ["size", "size", ""], ["ms", "ms", ".3f"], ["share", "share of floor, %", ".1f"],
    ["gib", "GiB", ".2f"], ["eager", "eager, ms", ".3f"], ["compile", "torch.compile, ms", ".3f"],
    ["goal", f"{100 * GOAL:.0f} % of the floor", ""],
]  # fmt: skip


def run(options: argparse.Namespace, here: BenchSetup, start: float) -> tuple[list[Row], int]:
    """Measure the forms, publish their page and print the table; return all rows and the number of failed forms."""
    chosen = [form for form in FORMS if options.only is None or form.op in options.only]
    budget = BUDGET if options.budget is None else options.budget
    found = measure(chosen, here, options, start + budget)
    table = rows_of_table(found)
    failed = [row for row in table if row["goal"].startswith("failed")]
    missing = {form.label for form in chosen} - {row["form"] for row in table}
    left_out = [
        *(f"Without a row: {row['form']} ({row['goal']})." for row in failed),
        *(f"Not run, the time was spent: {label}." for label in sorted(missing)),
        *(f"Failed: {row.case.op} by {row.provider} ({row.failure})."
          for rows in found for row in rows if row.failure and row.provider != "ours"),
    ]  # fmt: skip
    publish(options, here, [row for row in table if row not in failed], left_out)
    print_table(table, len(chosen))
    return [row for rows in found for row in rows], len(failed)


def publish(options: argparse.Namespace, here: BenchSetup, good: list[dict], left_out: list[str]) -> None:
    pages.publish(
        options,
        page="kernel_forms" + "_small" * options.small,
        title="Forms of kernels, forward + backward" + " (with --small: tiny sizes)" * options.small,
        intro="This page measures the forms of norms, gated activations and rotary embeddings that single families of "
        "models use, next to the same form in eager torch and in torch.compile.",
        caveats=[
            "Kernels are a part of a training step; the pages of whole steps show what they gain in training.",
            "The floor is the bytes of arguments and results, each moved once per direction, at the measured copy "
            f"bandwidth ({here.rates.copy / 1e12:.3g} TB/s). For rotary embeddings it includes the tables. A "
            "share above 100 % is faster than that copy; the chart shows it as over 100.",
            "GiB are above the inputs. Eager torch computes as the models do, with torch's norm if it has the form.",
            "Sizes are rows x width, of packed forms the width of one half; for `apply_rope` tokens, with 32 query and "
            "8 key heads of 128, and in latent attention 128 query heads and 1 key head of 64 columns.",
        ],
        columns=COLUMNS,
        rows=good,
        left_out=left_out,
        chart={"kind": "bars", "labels": ["form"], "values": {"share": FORM_SHARE_AXIS}, "limit": 100, "ours": "form"},
    )


def print_table(table: list[dict], n_forms: int) -> None:
    """Print the short table, which stands last in the output."""
    columns = [column for column in COLUMNS if column[0] not in ("size", "eager")]
    print("\n| " + " | ".join(header for _, header, _ in columns) + " |")
    print("|---" * len(columns) + "|")
    for row in table:
        cells = ["" if row.get(key) is None else format(row[key], how) for key, _, how in columns]
        print(f"| {' | '.join(cells)} |")
    counts = {verdict: sum(row["goal"].startswith(verdict) for row in table) for verdict in ("met", "missed", "failed")}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{n_forms} forms: {said}, {n_forms - len(table)} not run", flush=True)
