"""Search launch choices of the norms and RoPE that are faster than the present ones, on one GPU.

    scripts/bench tune_kernels [--only rms_norm,layer_norm,apply_rope] [--budget 90] [--out FOLDER] [--small]

bf16, caches cold, all candidates in turn, as in scripts/bench kernels. It prints the traffic and time of each
direction, then every candidate, whose outputs and gradients are compared with the present ones before it is timed.
launch_candidates.py has the candidates and their reasons. With --small it runs on a CPU, on tiny sizes, through
Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from ligertune_kernels.launcher import backend

from benchmarks import pages
from benchmarks.ops.launch_candidates import PRESENT, Candidate, best_of_each, candidates
from benchmarks.ops.launch_trial import trial
from ligertune.bench.case import Case, Mode, Provider, Tensors
from ligertune.bench.measure import (
    BENCHMARKS,
    BenchSetup,
    BoundProvider,
    Repetitions,
    Row,
    bench,
    bench_setup,
    first_line,
    report_header,
)

# Op, size, size for a CPU, and the share of the bandwidth floor that both directions together should reach.
GOALS = (
    ("rms_norm", (8192, 4096), (11, 512), 0.88),
    ("layer_norm", (8192, 4096), (11, 512), 0.88),
    ("layer_norm", (8192, 8192), (7, 1024), 0.92),
    ("layer_norm", (8192, 16384), (5, 2048), 0.92),
    ("apply_rope", (8192,), (5,), 0.94),
)
MODES: tuple[Mode, ...] = ("forward", "backward", "both")
ROUNDINGS = 2  # of the dtype: a statistic that differs in its last bit changes the rounding of x̂ and then of y
CANCELLED = 1e-4  # of the largest value: cancelling terms summed in another order


@dataclass
class Tried:
    """A candidate at one size."""

    candidate: Candidate
    provider: Provider
    decided: dict[str, str]  # what was launched, by direction
    verdict: str = ""  # why it was not timed
    row: Row | None = None

    def ms(self, mode: Mode) -> float | None:
        timed = self.row is not None and mode in self.row.device
        return 1e3 * self.row.device[mode].median if timed else None

    def as_dict(self) -> dict:
        about = {"candidate": self.candidate.name, "why": self.candidate.why, "launched": self.decided}
        return {**about, "verdict": self.verdict, "measured": self.row.as_dict() if self.row else None}


def main() -> int:
    options = parse()
    start = time.perf_counter()
    device = torch.device("cpu" if options.small else "cuda")
    if backend(device) != "triton":
        sys.exit(f"Error: no kernel runs on {device} here; on a CPU set TRITON_INTERPRET=1")
    dtype = torch.float32 if options.small else torch.bfloat16
    effort = Repetitions(0, 1) if options.small else Repetitions(3, 20, 0.15)
    # a candidate's row shows any error of Triton or the driver
    here = bench_setup(device, dtype, effort, failures=(Exception,))
    about = report_header(here)
    print(about["line"], flush=True)
    wanted = [goal for goal in GOALS if options.only is None or goal[0] in options.only]
    found = []
    for i, (op, size, small, goal) in enumerate(wanted):
        case = Case(op, small if options.small else size, dtype)
        # remaining time of earlier rows is shared by later rows
        begun = time.perf_counter()
        deadline = begun + (start + options.budget - begun) / (len(wanted) - i)
        tried = try_all(case, here, deadline)
        profile(case, tried, here, goal)
        found.append((case, goal, tried))
    summary(found)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if options.out:
        write(options.out / "tune_kernels.json", about, found)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="these ops")
    parser.add_argument(
        "--budget", type=float, default=90.0, help="seconds for all rows; candidates beyond are left out"
    )
    parser.add_argument("--out", type=Path, help="write tune_kernels.json into this folder")
    parser.add_argument("--small", action="store_true", help="on a CPU, on tiny sizes")
    options = pages.parse_arguments(parser)
    options.budget = float("inf") if options.small else options.budget  # the interpreter has no time limit
    unknown = set(options.only or ()) - {goal[0] for goal in GOALS}
    if unknown:
        parser.error(f"nothing to tune in {', '.join(sorted(unknown))}; there are rms_norm, layer_norm, apply_rope")
    return options


def try_all(case: Case, here: BenchSetup, deadline: float) -> list[Tried]:
    """Return the present choice first and, where directions can differ, the fastest of each last."""
    tried = [prepared(case, candidate) for candidate in (PRESENT, *candidates(case))]
    check(case, tried, here, deadline)
    measure(case, tried, here)
    both = best_of_each([(one.candidate, one.ms("forward"), one.ms("backward")) for one in tried])
    if both is not None:
        again = [prepared(case, dataclasses.replace(PRESENT, name="now, again")), prepared(case, both)]
        check(case, again, here, float("inf"))
        measure(case, again, here)
        tried += again
    return tried


def prepared(case: Case, candidate: Candidate) -> Tried:
    ours = next(provider for provider in BENCHMARKS[case.op].providers if provider.name == "ours")
    decided: dict[str, str] = {}
    within = trial(case, candidate, decided)
    return Tried(candidate, dataclasses.replace(ours, name=candidate.name, within=within), decided)


def check(case: Case, tried: list[Tried], here: BenchSetup, deadline: float) -> None:
    """Compile and run each candidate, and record why one is not timed. Results are compared with the first."""
    torch.manual_seed(0)
    args = BENCHMARKS[case.op].inputs(case, here.device)
    true = passes(case, tried[0], args)
    for one in tried[1:]:
        if time.perf_counter() > deadline:
            one.verdict = "not tried: no time was left"
            continue
        try:
            found = passes(case, one, args)
        except here.failures as problem:
            one.verdict = f"failed: {first_line(problem)}"
            continue
        left = set(one.candidate.directions) - set(one.decided)
        if left:
            one.verdict = f"failed: nothing was launched through it {' and '.join(sorted(left))}"
        elif not one.candidate.probe:
            one.verdict = difference(found, true)
        del found
        gc.collect()


def passes(case: Case, one: Tried, args: Tensors) -> Tensors:
    """Return outputs, then gradients."""
    with one.provider.within():
        outputs, gradients = BoundProvider(one.provider, case, args).both()
        if gradients[0].is_cuda:
            torch.cuda.synchronize()  # so that a failing kernel raises here
    return tuple(t.detach() for t in (*outputs, *gradients))


def difference(found: Tensors, true: Tensors) -> str:
    """Return a description of differences larger than rounding, empty if there is none."""
    for i, (ours, present) in enumerate(zip(found, true, strict=True)):
        apart, size = (ours.float() - present.float()).abs(), present.float().abs()
        allowed = ROUNDINGS * torch.finfo(present.dtype).eps * size + CANCELLED * size.max()
        wrong = int((~(apart <= allowed)).sum())  # counts NaN
        if wrong:
            return f"wrong: tensor {i}: {wrong} of {apart.numel()} elements differ, by up to {apart.max().item():.2g}"
    return ""


def measure(case: Case, tried: list[Tried], here: BenchSetup) -> None:
    """Time all correct candidates alternately, with the benchmarks' engine."""
    good = {one.provider.name: one for one in tried if not one.verdict}
    extra = {case.op: tuple(one.provider for one in good.values())}
    (rows,) = bench([case], here, modes=MODES, extra=extra, chosen=lambda p: p in extra[case.op])
    for row in rows:
        good[row.provider].row = row
        good[row.provider].verdict = f"failed: {row.failure}" if row.failure else ""


def profile(case: Case, tried: list[Tried], here: BenchSetup, goal: float) -> None:
    """Print traffic, minimum and present time of each direction; then what was not timed."""
    present = tried[0]
    moved = BENCHMARKS[case.op].work(case).traffic
    print(f"\n`{case.op}` {case.label}, as it is: {launched(present)}")
    for mode, count in zip(MODES, (*moved, sum(moved)), strict=True):
        took, floor = present.ms(mode), 1e3 * count / here.rates.copy
        lost = f"loses {took - floor:.4f} ms"
        wanted = f", goal {100 * goal:.0f} %" if mode == "both" else ""
        shares = f"{100 * floor / took:.1f} % of the floor{wanted}"
        print(f"  {mode:9s} {count / 1e6:8.1f} MB, floor {floor:.4f} ms, takes {took:.4f}, {lost}: {shares}")
    for one in tried:
        if one.candidate.probe and one.row:
            print(f"  {one.candidate.name}: backward {one.ms('backward'):.4f} ms ({one.candidate.why})")
        elif one.verdict:
            print(f"  {one.candidate.name}: {one.verdict}")
    sys.stdout.flush()


def launched(one: Tried) -> str:
    return "; ".join(f"{direction}: {what}" for direction, what in one.decided.items())


def summary(found: list[tuple[Case, float, list[Tried]]]) -> None:
    """Print every timed candidate, the fastest of a row first; then what the code chooses."""
    print("\n| op, size | candidate | forward ms | backward ms | both ms | share | |\n|---|---|---|---|---|---|---|")
    for case, goal, tried in found:
        timed = [one for one in tried if one.ms("both") and not one.candidate.probe]
        for one in sorted(timed, key=lambda one: one.ms("both")):
            share = one.row.share("both")
            cells = [f"`{case.op}` {case.label}", one.candidate.name, *(f"{one.ms(mode):.4f}" for mode in MODES)]
            print(f"| {' | '.join(cells)} | {100 * share:.1f} % | {'ok' if share >= goal else 'short'} |")
    print()
    for case, _, tried in found:
        print(f"now `{case.op}` {case.label}: {launched(tried[0])}")


def write(path: Path, about: dict, found: list[tuple[Case, float, list[Tried]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"op": case.op, "sizes": case.sizes, "goal": goal, "tried": [one.as_dict() for one in tried]}
        for case, goal, tried in found
    ]
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
