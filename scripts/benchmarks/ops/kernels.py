"""Benchmark the kernels against eager code, torch, torch.compile and the installed peers, on one GPU.

    scripts/bench kernels [--only rms_norm,swiglu] [--budget 450] [--out FOLDER] [--page docs/benchmarks] [--small]
    scripts/bench kernels --forms [--only rms_norm,swiglu] [--page docs/benchmarks] [--small]

Forward + backward in bf16 (the divergences in fp32) with cold caches. Providers alternate, in another order each round.
A cell shows ms, share of the floor, and GiB above the inputs. The floor is the least time at the copy and matmul rates
that this GPU reached at the start. --forms measures the forms of these ops that single families use, 100 s of time.
--small runs tiny sizes on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import ligertune_kernels
import torch
from ligertune_kernels import schedule_of

from benchmarks import pages
from benchmarks.ops import kernel_forms
from benchmarks.pages import GIB
from benchmarks.sides import kernel_libraries
from benchmarks.tables.kernel_goals import LINES, Goal, Line
from ligertune.bench.case import IN_PLACE, Case, Provider, function
from ligertune.bench.measure import BenchSetup, Repetitions, Row, bench, bench_setup, cases_of, report_header

BUDGET = 450.0  # seconds after which no further row starts
NOISE = 1.02  # no slower than a peer: within 2 %
SHARE_AXIS = (
    "share of the floor, % (more is better)\nfloor: the least time at the measured copy and matmul rates;\n"
    "faster than these: drawn at 100 %"
)
NOTHING = 2 << 20  # bytes: losses of some rows, and what the allocator rounds up


LEAN = function("ours, lean", lambda *args: ligertune_kernels.linear_cross_entropy(*args, chunk_bytes=LEAN_CHUNK_BYTES))
LEAN_CHUNK_BYTES = 1 << 27  # 512 rows of a 128k vocabulary
ALL_ROWS = function("ours, all rows", lambda *args: ligertune_kernels.linear_cross_entropy(*args, skip_ignored=False))


def _with_known_rows(case: Case, args: tuple[torch.Tensor, ...]):
    """Find the rows beforehand: in training the collator does it for each batch."""
    rows = ligertune_kernels.labelled_rows(args[2].cpu()).to(args[2].device)
    return lambda: ligertune_kernels.linear_cross_entropy(*args, labelled_rows=rows)


ROWS_KNOWN = Provider("ours, rows known", _with_known_rows)
ROW_FORMS = (ROWS_KNOWN, ALL_ROWS)
HOST_CASE = Case("rms_norm", (1024, 1024), torch.bfloat16)
HOST_LIMIT = 1.2  # times torch's own fused op
CAVEATS = [
    "In several ops liger-kernel writes gradients over its inputs, which saves memory.",
    "Several ops of ligertune have a form that writes gradients over its inputs (`inplace=True`) and one that does "
    "not. The table shows the faster form. Where both take the same time, chance decides which memory it shows.",
    '"Lean" is `chunk_bytes` of 128 MiB: less memory, and most logits are computed twice.',
    "Providers alternate, in another order each round. The dtype is bfloat16; in `kl_div` and `jsd` it is float32, in "
    "`int2_int8_matmul` int8.",
    "Sizes are rows x width, except in: `linear_cross_entropy` and `embedding`, tokens x hidden size x vocabulary; "
    "`linear_jsd`, tokens x hidden size of student x of teacher x vocabulary; `apply_rope`, tokens, with 32 query "
    "heads and 8 key and value heads of 128; `document_attention`, documents x tokens of each, with the same heads; "
    "`group_norm`, batch x channels x length; `int2_int8_matmul` (forward only), m x n x k; `dequantize_nf4` (forward "
    "only), experts x rows x columns of the gate and up projections of one layer of Qwen3-30B-A3B and of Mixtral-8x7B.",
]
PEERS = ("liger", "quack", "cce", "torch.compile", "torch", "eager")  # columns; with their in-place forms


def main() -> int:
    options = parse()
    start = time.perf_counter()
    device = torch.device("cpu" if options.small else "cuda")
    dtype = torch.float32 if options.small else torch.bfloat16
    effort = Repetitions(1, 3, 0.05) if options.small else Repetitions(3, 20, 0.4)
    here = bench_setup(device, dtype, effort, failures=(Exception,))  # a peer's row shows any error that it raises
    about = {**report_header(here), "peers": kernel_libraries.installed()}
    print(", ".join([about["line"], *(f"{peer} {version}" for peer, version in about["peers"].items())]), flush=True)
    if options.forms:
        rows, failed = kernel_forms.run(options, here, start)
        store(options, about, rows)
        return 1 if failed else 0
    extra = kernel_libraries.providers()
    extra["linear_cross_entropy"] += (LEAN, ROWS_KNOWN, ALL_ROWS)
    for peer in sorted(set(kernel_libraries.PACKAGES) - set(kernel_libraries.installed())):
        print(f"not installed: {kernel_libraries.PACKAGES[peer]}")
    rows = table(chosen_lines(options), here, extra, options, start)
    timed = list(rows)
    rows += host_time(here, extra, options)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    store(options, about, rows)
    page(options, here, timed)
    return 0


def store(options: argparse.Namespace, about: dict, rows: list[Row]) -> None:
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        found = {**about, "rows": [row.as_dict() for row in rows]}
        (options.out / "bench_kernels.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="these ops")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], help="providers to leave out")
    parser.add_argument("--forms", action="store_true", help="the forms of norms, gated activations and RoPE instead")
    parser.add_argument(
        "--budget",
        type=float,
        help=f"no row starts after these seconds ({BUDGET:.0f}; forms {kernel_forms.BUDGET:.0f})",
    )
    parser.add_argument("--out", type=Path, help="write bench_kernels.json into this folder")
    parser.add_argument("--small", action="store_true", help="on a CPU, on tiny sizes")
    return pages.parse(parser)


def chosen_lines(options: argparse.Namespace) -> list[Line]:
    lines = [line for line in LINES if options.only is None or line.case.op in options.only]
    if not options.small:
        return lines
    shrunk: dict[Case, Line] = {}
    for line in lines:
        case = cases_of(line.case.op, dtype=torch.float32, small=True)[-1]
        case = dataclasses.replace(case, frozen_head=line.case.frozen_head, ignored=line.case.ignored)
        shrunk.setdefault(case, dataclasses.replace(line, case=case))
    return list(shrunk.values())


def table(
    lines: list[Line],
    here: BenchSetup,
    extra: dict[str, tuple[Provider, ...]],
    options: argparse.Namespace,
    start: float,
) -> list[Row]:
    """Print each row when it is measured, then the missed goals and failures with their reasons."""
    print("\n| op, size | floor ms | ours: ms, share, GiB | " + " | ".join(PEERS) + " | fastest peer | |")
    print("|---" * (len(PEERS) + 5) + "|", flush=True)
    kept, said, full = [], [], {}
    budget = BUDGET if options.budget is None else options.budget
    for line in lines:
        name = f"`{line.case.op}` {line.case.label}"
        if time.perf_counter() - start > budget:
            said.append(f"not run, the budget of {budget:.0f} s is spent: {name}")
            continue
        only_case = bench([line.case], here, modes=("both",), chosen=wanted(options, line), extra=extra)
        (rows,) = only_case
        kept += rows
        said += [f"failed: {name}: {row.provider}: {row.failure}" for row in rows if row.failure]
        said += [f"{name}: {row.provider}: {note}" for row in rows for note in row.notes]
        for form, goal in line.goals.items():
            row = next(row for row in rows if row.provider == form)
            if not line.case.ignored:
                full.setdefault((line.case.sizes, line.case.frozen_head), row)
            missed = [] if row.failure else short(goal, row, rows, full)
            print_line(name + form.removeprefix("ours"), row, rows, missed)
            if line.case.op == "linear_cross_entropy":
                said.append(f"schedule: {name}{form.removeprefix('ours')}: {schedule(line.case, form)}")
            said += [f"short: {name}{form.removeprefix('ours')}: {reason}" for reason in missed]
    print("\n" + "\n".join(dict.fromkeys(said)), flush=True)
    return kept


def schedule(case: Case, form: str) -> str:
    n, e, v = case.sizes
    options = {"chunk_bytes": LEAN_CHUNK_BYTES} if form == "ours, lean" else {}
    rows = n if form == ALL_ROWS.name else round((1.0 - case.ignored) * n)
    return str(schedule_of(rows, e, v, case.dtype, needs_dw=not case.frozen_head, **options))


def print_line(name: str, row: Row, rows: list[Row], missed: list[str]) -> None:
    by_name = {other.provider: other for other in rows}
    peers = [cell(by_name.get(f"{peer}, in place"), by_name.get(peer)) for peer in PEERS]
    best, floor = fastest(rows), 1e3 * next(iter(row.floors.values()))
    verdict = "failed" if row.failure else "short" if missed else "ok"
    cells = [name, f"{floor:.3g}", cell(row), *peers, best.provider if best else "", verdict]
    print(f"| {' | '.join(cells)} |", flush=True)


def page(options: argparse.Namespace, here: BenchSetup, timed: list[Row]) -> None:
    """Publish the page: a row per case, a column per provider that was measured."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in timed:
        cases.setdefault((row.case.op, row.case.label), {})[row.provider] = row
    names = {"ligertune": ("ours", IN_PLACE), "ligertune, lean": ("ours, lean",)}
    full = {kernel_libraries.NAMES[package]: name for package, name in kernel_libraries.PACKAGES.items()}
    names |= {full.get(peer, peer): (peer, f"{peer}, in place") for peer in PEERS}
    rows = []
    for (op, size), found in cases.items():
        row = {"op": f"`{op}`", "size": size, "label": f"{op} {size}"}
        for name, forms in names.items():
            measured = [found[form] for form in forms if form in found and seconds(found[form])]
            row |= {name: cell(*measured) or None, f"{name} share": best_share(measured)}
        rows.append(row)
    shown = [name for name in names if any(row[name] for row in rows)]
    rates = f"({here.rates.copy / 1e12:.3g} TB/s), or FLOPs / the measured matmul rate ({here.rates.matmul / 1e12:.3g}"
    pages.publish(
        options,
        page="kernels" + "_small" * options.small,
        title="Kernels, forward + backward" + " (with --small: tiny sizes)" * options.small,
        intro="This page compares the time and memory of single kernels, forward and backward.",
        caveats=[
            "Kernels are a part of a training step; the pages of whole steps show what they gain in training.",
            f"The floor is bytes / the measured copy bandwidth {rates} TFLOP/s). A "
            "share above 100 % is faster than that; the chart shows it as 100 %.",
            *slower_rows(rows, [name for name in shown if not name.startswith("ligertune")]),
            *CAVEATS,
        ],
        columns=[["op", "op", ""], ["size", "size", ""], *([name, name, ""] for name in shown)],
        rows=rows,
        left_out=["A cell holds milliseconds, the share of the floor, and GiB above the inputs.",
                  *(f"Failed: `{row.case.op}` {row.case.label} by {row.provider}." for row in timed if row.failure)],
        chart={"kind": "dots", "labels": ["label"], "axis": SHARE_AXIS, "limit": 100,
               "values": {f"{name} share": name for name in shown}},
    )  # fmt: skip


def slower_rows(rows: list[dict], peers: list[str]) -> list[str]:
    """Return sentences about the rows in which a peer is faster by more than noise; of "lean", only liger-kernel."""
    said = []
    for ours, others in (("ligertune", peers), ("ligertune, lean", [name for name in peers if name == "liger-kernel"])):
        found = []
        for row in rows:
            share, best = row[f"{ours} share"], max(others, key=lambda name: row[f"{name} share"] or 0, default=None)
            if share and best and (row[f"{best} share"] or 0) > NOISE * share:
                found.append(
                    f"{row['op']} {row['size']} ({best} takes {1 - share / row[f'{best} share']:.1%} less time)"
                )
        than = "liger-kernel" if ours.endswith("lean") else "another column"
        said += [f'Rows in which "{ours}" is more than 2 % slower than {than}: {"; ".join(found)}.'] if found else []
    return said


def best_share(measured: list[Row]) -> float | None:
    """Return the share of the floor of the fastest row, in percent."""
    shares = [100 * next(iter(row.floors.values())) / seconds(row) for row in measured]
    return max(shares, default=None)


def wanted(options: argparse.Namespace, line: Line | None = None):
    """Choose the providers of a row; those of ROW_FORMS only where the row has a goal for them."""
    left_out = {form.name for form in ROW_FORMS} - set(line.goals if line else ())
    return lambda provider: provider.name not in (*options.without, *left_out)


def seconds(row: Row) -> float | None:
    timing = row.device.get("both") or row.device.get("forward")
    return timing.median if timing else None


def cell(*rows: Row | None) -> str:
    """Return ms, share of the floor and GiB of the fastest row that was measured."""
    there = [row for row in rows if row is not None]
    measured = [row for row in there if seconds(row)]
    if not measured:
        return "failed" if there else ""
    row = min(measured, key=seconds)
    memory = "" if row.peak_bytes is None else f", {row.peak_bytes / GIB:.2f}"
    share = next(iter(row.floors.values())) / seconds(row)
    return f"{1e3 * seconds(row):.3g}, {100 * share:.0f} %{memory}"


def fastest(rows: list[Row]) -> Row | None:
    peers = [row for row in rows if not row.provider.startswith("ours") and seconds(row)]
    return min(peers, key=seconds, default=None)


def short(goal: Goal, ours: Row, rows: list[Row], full: dict) -> list[str]:
    """Return the parts of the goal that are missed."""
    took, missed = seconds(ours), []
    share = next(iter(ours.floors.values())) / took
    best = fastest(rows)
    liger = next((row for row in rows if row.provider.startswith("liger") and seconds(row)), None)
    whole = full.get((ours.case.sizes, ours.case.frozen_head))
    if goal.share is not None and share < goal.share:
        missed.append(f"{100 * share:.1f} % of the floor, goal {100 * goal.share:.0f} %")
    if goal.no_slower and best is not None and took > NOISE * seconds(best):
        missed.append(f"{1e3 * took:.3g} ms, {best.provider} {1e3 * seconds(best):.3g} ms")
    if goal.times_liger and liger is not None and seconds(liger) < goal.times_liger * took:
        missed.append(f"{seconds(liger) / took:.2f} x liger, goal {goal.times_liger} x")
    if goal.of_full and whole is not None and seconds(whole) and took > goal.of_full * seconds(whole):
        missed.append(f"{100 * took / seconds(whole):.0f} % of the full time, goal {100 * goal.of_full:.0f} %")
    if ours.peak_bytes is not None:
        allowed = []
        if goal.above_liger is not None and liger is not None:
            allowed.append(liger.peak_bytes + goal.above_liger * GIB)
        if goal.most is not None:
            allowed.append(goal.most * GIB)
        if allowed and ours.peak_bytes > min(allowed) + NOTHING:
            missed.append(f"peak {ours.peak_bytes / GIB:.3f} GiB, goal {min(allowed) / GIB:.3f}")
    plain = next((row for row in rows if row.provider in ("torch", "eager") and row.error), None)
    if goal.error and plain is not None and ours.error is not None and not ours.error <= goal.error * plain.error:
        missed.append(f"error {ours.error:.2e}, {plain.provider}'s {plain.error:.2e}, goal {goal.error} x")
    return missed


def host_time(here: BenchSetup, extra: dict[str, tuple[Provider, ...]], options: argparse.Namespace) -> list[Row]:
    """Print and return the host time of one forward and backward of a small norm."""
    if options.only is not None and HOST_CASE.op not in options.only:
        return []
    case = dataclasses.replace(HOST_CASE, dtype=torch.float32) if options.small else HOST_CASE
    patient = dataclasses.replace(here, repetitions=Repetitions(10, 5 if options.small else 100, 5.0))
    (rows,) = bench([case], patient, modes=("both",), chosen=wanted(options), extra=extra)
    print(f"\nHost time of one forward + backward of `rms_norm` {case.label}, µs (median; 20 % to 80 %):")
    host = {row.provider: row.host["both"] for row in rows if not row.failure}
    for name, timing in host.items():
        print(f"  {name:14s} {1e6 * timing.median:7.0f}  ({1e6 * timing.p20:.0f} to {1e6 * timing.p80:.0f})")
    if "ours" in host and "torch" in host:
        ratio = host["ours"].median / host["torch"].median
        print(f"  {ratio:.2f} x torch's: {'ok' if ratio <= HOST_LIMIT else 'short'} (goal {HOST_LIMIT} x)")
    return rows
