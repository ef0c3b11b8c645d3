"""Benchmark recurrences of hybrid models and their convolution, forward and backward, against other implementations.

    scripts/bench recurrences [--ops gated_delta_rule,ssd,...] [--tokens 2048,8192,...] [--page docs/benchmarks]

In bfloat16, one row of 2,048, 8,192, 32,768 and 131,072 tokens:

    gated_delta_rule    Qwen3.5-4B and 9B: 16 heads of keys and 32 of values, 128 wide
    causal_conv1d       the same: 8,192 channels and 4 taps, with SiLU
    ssd                 Nemotron-H-8B: 128 heads of 64, 8 groups with states of 128
    kda                 Kimi-Linear-48B-A3B: 32 heads of 128

Sides:

    ligertune        the op
    packed           the same on documents of 300 tokens, which no other side keeps apart
    transformers     its functions in torch, up to 8,192 tokens
    compiled         these with torch.compile, up to 8,192 tokens, where a minute is enough
    fla              flash-linear-attention, where it is installed; its refusals are named
    mamba_ssm        mamba-ssm's scan, where it is installed
    causal_conv1d    the package's convolution, where it is installed
    copy             a copy of the convolution's input: forward one copy, backward one and a half (x and dy to dx)

All sides run in one process on the same tensors. Times are medians of runs by CUDA events. "Kept" is what the backward
needs besides the inputs. --small runs tiny shapes on a CPU, with the kernels' PyTorch references, to test the script.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from benchmarks import pages, processes
from benchmarks.ops.attention import differences, guarded, release, timed
from benchmarks.ops.recurrence_sides import DOCUMENT, LONGEST_IN_TORCH, SIDES, Case, case_of

TOKENS = (2048, 8192, 32768, 131072)
SMALL_TOKENS = (130,)
MIB = 2**20
TIMING = SimpleNamespace(repeats=20, seconds=0.6)
SAME = 0.03  # largest relative difference of two sides' results, in bfloat16


def main() -> int:
    options = parse()
    if options.line:
        for point in measure(options):
            processes.say(point)
        return 0
    points, reason = processes.run(
        processes.again("--line"), limit=options.budget + 60, show=lambda point: print(words(point), flush=True)
    )
    return page(options, points, reason)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(SIDES))
    parser.add_argument("--tokens", help="comma-separated (default: all)")
    parser.add_argument("--sides", help="comma-separated (default: all)")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which the process is ended")
    parser.add_argument("--limit", type=int, default=60, help="seconds of a side at a length, with its compilation")
    parser.add_argument("--small", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--line", action="store_true", help=argparse.SUPPRESS)
    options = pages.parse(parser)
    options.ops = options.ops.split(",")
    options.lengths = SMALL_TOKENS if options.small else TOKENS
    if options.tokens:
        options.lengths = tuple(map(int, options.tokens.split(",")))
    return options


# ---- measurements, in their own process


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a point per op, side and length; of what failed, the reason. Sides that compile for long come last."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for op in options.ops:
        sides = SIDES[op]
        expected = {}  # by length: the results of the first side, ours
        for side, make in sides.items():
            in_torch = side in ("transformers", "compiled")
            for tokens in options.lengths:
                if (options.sides and side not in options.sides) or (in_torch and tokens > LONGEST_IN_TORCH):
                    continue
                case = case_of(op, tokens, device, small=options.small)
                point = {"op": op, "tokens": tokens, "side": side}
                with guarded(point), ended_after(options.limit):
                    point |= point_of(case, make(case), device)
                    found = point.pop("found")
                    if found and side not in ("packed", "copy"):
                        point["differs"] = max(differences(found, expected.setdefault(tokens, found)))
                case = None
                found = None
                release(device)
                yield point


@contextlib.contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer."""

    def end(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def point_of(case: Case, function: Callable, device: str) -> dict:
    """Return times in ms, memory in MiB and the results of a side. A backward that fails leaves the forward's time."""
    import torch

    cuda = device == "cuda"

    def forward(mark: Callable = lambda: None) -> list:
        with torch.no_grad():
            function(*case.leaves)
        mark()
        return []

    def both(mark: Callable = lambda: None) -> list:
        out = function(*case.leaves)
        mark()
        return [out, *torch.autograd.grad(out, case.leaves, case.d_out)]

    forward()
    point = {"forward_ms": statistics.median(run[2] for run in timed(forward, cuda, TIMING)), "found": []}
    held = torch.cuda.memory_allocated() if cuda else 0
    out = function(*case.leaves)
    if cuda:
        point["kept_mib"] = (torch.cuda.memory_allocated() - held - out.numel() * out.itemsize) / MIB
    del out
    with guarded(point):
        point["found"] = [t.detach() for t in both()]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            both()
            point["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / MIB
        point["both_ms"] = statistics.median(run[2] for run in timed(both, cuda, TIMING))
    return point


# ---- page


def words(point: dict) -> str:
    place = f"{point['op']}, {point['tokens']:,} tokens, {point['side']}"
    if "forward_ms" not in point:
        return f"{place}: {point.get('failed')}"
    both = f"{point['both_ms']:.3f} ms together" if "both_ms" in point else point.get("failed", "")
    kept = (
        f", {point['kept_mib']:.0f} MiB kept, {point.get('peak_mib', 0):.0f} at the peak" if "kept_mib" in point else ""
    )
    return f"{place}: {point['forward_ms']:.3f} ms forward, {both}{kept}, differs by {point.get('differs', 0):.1e}"


def page(options: argparse.Namespace, points: list[dict], reason: str | None) -> int:
    rows = [ratios(point, points) for point in points if "forward_ms" in point]
    rows.sort(key=lambda row: (row["op"], row["tokens"]))
    pages.publish(
        options,
        page="recurrences" + "_small" * options.small,
        title="Recurrences of hybrid models and their convolution" + " (with --small: tiny shapes)" * options.small,
        intro="This page compares `gated_delta_rule`, `ssd`, `kda` and `causal_conv1d` with transformers' functions in "
        "torch, with torch.compile of them, with flash-linear-attention (fla), mamba-ssm and causal-conv1d, "
        "by the length of the row.",
        caveats=[
            "Random bfloat16 tensors in the shapes of Qwen3.5-4B and 9B (gated_delta_rule: 16 heads of keys, 32 of "
            "values, 128 wide; causal_conv1d: 8,192 channels, 4 taps), Nemotron-H-8B (ssd: 128 heads of 64, 8 groups "
            "of 128) and Kimi-Linear-48B-A3B (kda: 32 heads of 128).",
            "Medians of up to 20 runs by CUDA events, of 2 where one takes long: the GPU's time, without the host's. "
            "Small differences may be noise.",
            f"'packed' computes documents of {DOCUMENT} tokens, which the other sides do not keep apart.",
            "'Kept' is what the backward needs besides the inputs. The peak counts outputs, gradients and what is in "
            "use meanwhile, without the inputs.",
            f"Sides in torch run up to {LONGEST_IN_TORCH:,} tokens.",
        ],
        columns=[["op", "op", ""], ["tokens", "tokens", ",d"], ["side", "side", ""],
                 ["forward_ms", "forward, ms", ".3f"], ["both_ms", "forward and backward, ms", ".3f"],
                 ["forward_times", "forward: ligertune's speed over it", ".2f"],
                 ["both_times", "both: ligertune's speed over it", ".2f"],
                 ["kept_mib", "kept, MiB", ".0f"], ["peak_mib", "added at the peak, MiB", ".0f"],
                 ["differs", "differs by", ".1e"]],
        rows=rows,
        left_out=left_out(points, reason),
        remarks=[],
    )  # fmt: skip
    right = all(row.get("differs", 0) < SAME for row in rows)
    return 0 if rows and right and not reason else 1


def ratios(point: dict, points: list[dict]) -> dict:
    """Return a row with the speed of ligertune over this side's."""
    ours = next(p for p in points if (p["op"], p["tokens"], p["side"]) == (point["op"], point["tokens"], "ligertune"))
    return point | {
        f"{name}_times": point[f"{name}_ms"] / ours[f"{name}_ms"]
        for name in ("forward", "both")
        if f"{name}_ms" in point and f"{name}_ms" in ours
    }


def left_out(points: list[dict], reason: str | None) -> list[str]:
    places: dict[tuple[str, str, str], list[str]] = {}
    for point in (point for point in points if "failed" in point):
        part = "backward" if "forward_ms" in point else "forward"
        places.setdefault((point["side"], part, point["failed"]), []).append(f"{point['op']} {point['tokens']:,}")
    said = [f"Not measured: the {part} of {side} ({', '.join(which)}): {why.rstrip('.')}."
            for (side, part, why), which in places.items()]  # fmt: skip
    return [*said, f"The run ended early: {reason}."] if reason else said
