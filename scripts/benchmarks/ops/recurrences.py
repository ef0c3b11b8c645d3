"""Benchmark the gated delta rule and its convolution, forward and backward, against transformers, compiled, and fla.

    scripts/bench recurrences [--ops gated_delta_rule,causal_conv1d] [--tokens 2048,8192,...] [--page docs/benchmarks]

Shapes of Qwen3.5-4B and 9B in bfloat16: 16 heads of keys and 32 of values, 128 wide; the convolution has 8,192 channels
and 4 taps, with SiLU. One row of 2,048, 8,192, 32,768 and 131,072 tokens. Sides:

    ligertune        gated_delta_rule, causal_conv1d
    packed           the same on documents of 300 tokens, which no other side keeps apart
    transformers     its functions in torch, up to 8,192 tokens
    compiled         these with torch.compile, up to 8,192 tokens, where a minute is enough
    fla              flash-linear-attention, where it is installed; its refusals are named
    copy             a copy of the convolution's input: forward one copy, backward one and a half (x and dy to dx)

All sides run in one process on the same tensors. Times are medians of runs by CUDA events. "Kept" is what the backward
needs besides the inputs. --small runs tiny shapes on a CPU, with the kernels' PyTorch references, to test the script.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from benchmarks import pages, processes
from benchmarks.ops.attention import differences, guarded, release, timed

OPS = ("gated_delta_rule", "causal_conv1d")
TOKENS = (2048, 8192, 32768, 131072)
SMALL_TOKENS = (130,)
LONGEST_IN_TORCH = 8192  # tokens: its loop over chunks takes a second for more, and 5 GiB
DOCUMENT = 300  # tokens of a packed document: about that of an Alpaca record
HEADS = (16, 32, 128, 128)  # of keys, of values; widths
SMALL_HEADS = (1, 2, 16, 16)
TAPS = 4
LIMIT = 60  # seconds of a side at a length, with its compilation
MIB = 2**20
TIMING = SimpleNamespace(repeats=20, seconds=0.6)
SAME = 0.03  # largest relative difference of two sides' results, in bfloat16


@dataclass(frozen=True)
class Case:
    op: str
    tokens: int
    leaves: tuple
    d_out: object


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
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--tokens", help="comma-separated (default: all)")
    parser.add_argument("--sides", help="comma-separated (default: all)")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which the process is ended")
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
        sides = DELTA_SIDES if op == "gated_delta_rule" else CONV_SIDES
        expected = {}  # by length: the results of the first side, ours
        for side, make in sides.items():
            in_torch = side in ("transformers", "compiled")
            for tokens in options.lengths:
                if (options.sides and side not in options.sides) or (in_torch and tokens > LONGEST_IN_TORCH):
                    continue
                case = case_of(op, tokens, device, small=options.small)
                point = {"op": op, "tokens": tokens, "side": side}
                with guarded(point), ended_after(LIMIT):
                    point |= point_of(case, make(case), device)
                    found = point.pop("found")
                    if found and side not in ("packed", "copy"):
                        point["differs"] = max(differences(found, expected.setdefault(tokens, found)))
                case = None
                found = None
                release(device)
                yield point


def case_of(op: str, tokens: int, device: str, *, small: bool) -> Case:
    import torch

    dtype = torch.float32 if small else torch.bfloat16
    torch.manual_seed(0)
    key_heads, value_heads, key_dim, value_dim = SMALL_HEADS if small else HEADS

    def made(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype)

    if op == "causal_conv1d":
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        leaves = (made(1, tokens, channels), made(channels, TAPS))
        d_out = made(1, tokens, channels)
    else:
        query, key = (made(1, tokens, key_heads, key_dim) for _ in range(2))
        # as slow as a trained model's slowest heads, so that states matter
        decay = -0.1 * torch.rand(1, tokens, value_heads, device=device)
        beta = torch.rand(1, tokens, value_heads, device=device, dtype=dtype)
        leaves = (query, key, made(1, tokens, value_heads, value_dim), decay, beta)
        d_out = made(1, tokens, value_heads, value_dim)
    return Case(op, tokens, tuple(t.requires_grad_() for t in leaves), d_out)


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
            both()
            point["peak_mib"] = torch.cuda.max_memory_allocated() / MIB
        point["both_ms"] = statistics.median(run[2] for run in timed(both, cuda, TIMING))
    return point


def packed_documents(tokens: int, device):
    import torch
    from ligertune_kernels import Documents

    places = torch.arange(tokens, device=device, dtype=torch.int32)
    starts = places // DOCUMENT * DOCUMENT
    return Documents(starts, (starts + DOCUMENT).clamp(max=tokens))


def our_delta(case: Case) -> Callable:
    from ligertune_kernels import gated_delta_rule

    return lambda *tensors: gated_delta_rule(*tensors, l2_norm=True)


def our_delta_packed(case: Case) -> Callable:
    from ligertune_kernels import gated_delta_rule

    documents = packed_documents(case.tokens, case.d_out.device)
    return lambda *tensors: gated_delta_rule(*tensors, l2_norm=True, documents=documents)


def torch_delta(case: Case) -> Callable:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    function = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    def call(query, key, value, decay, beta):
        group = value.shape[2] // key.shape[2]
        query, key = (t.repeat_interleave(group, 2) for t in (query, key))  # as the model does
        return function(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def fla_delta(case: Case) -> Callable:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call(query, key, value, decay, beta):
        return chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def our_conv(case: Case) -> Callable:
    from ligertune_kernels import causal_conv1d

    return lambda x, weight: causal_conv1d(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)


def our_conv_packed(case: Case) -> Callable:
    from ligertune_kernels import causal_conv1d

    documents = packed_documents(case.tokens, case.d_out.device)

    def call(x, weight):
        return causal_conv1d(x.transpose(1, 2), weight, activation="silu", documents=documents).transpose(1, 2)

    return call


def torch_conv(case: Case) -> Callable:
    from torch.nn import functional

    def call(x, weight):
        z = functional.conv1d(x.transpose(1, 2), weight[:, None], padding=TAPS - 1, groups=len(weight))
        return functional.silu(z[..., : x.shape[1]]).transpose(1, 2)

    return call


def fla_conv(case: Case) -> Callable:
    from fla.modules.convolution import causal_conv1d

    return lambda x, weight: causal_conv1d(x, weight, activation="silu")[0]


def copied(case: Case) -> Callable:
    import torch

    class Copy(torch.autograd.Function):
        """Read and write one tensor forward; read two and write one backward."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x.clone()

        @staticmethod
        def backward(ctx, d_out):
            x, weight = ctx.saved_tensors
            return torch.add(x, d_out), torch.zeros_like(weight)

    return Copy.apply


def compiled(make: Callable) -> Callable:
    def made(case: Case) -> Callable:
        import torch

        return torch.compile(make(case), dynamic=False)

    return made


DELTA_SIDES = {
    "ligertune": our_delta,
    "packed": our_delta_packed,
    "transformers": torch_delta,
    "fla": fla_delta,
    "compiled": compiled(torch_delta),
}
CONV_SIDES = {
    "ligertune": our_conv,
    "packed": our_conv_packed,
    "copy": copied,
    "transformers": torch_conv,
    "fla": fla_conv,
    "compiled": compiled(torch_conv),
}


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
        title="The gated delta rule and its convolution" + " (with --small: tiny shapes)" * options.small,
        intro="This page compares `gated_delta_rule` and `causal_conv1d` with transformers' functions in torch, with "
        "torch.compile of them, and with flash-linear-attention (fla), by the length of the row.",
        caveats=[
            "Random bfloat16 tensors in the shapes of Qwen3.5-4B and 9B: 16 heads of keys, 32 of values, 128 wide; "
            "8,192 channels and 4 taps.",
            "Medians of up to 20 runs by CUDA events, of 2 where one takes long: the GPU's time, without the host's. "
            "Small differences may be noise.",
            f"'packed' computes documents of {DOCUMENT} tokens, which the other sides do not keep apart.",
            "'Kept' is what the backward needs besides the inputs. Sides in torch run up to "
            f"{LONGEST_IN_TORCH:,} tokens.",
        ],
        columns=[["op", "op", ""], ["tokens", "tokens", ",d"], ["side", "side", ""],
                 ["forward_ms", "forward, ms", ".3f"], ["both_ms", "forward and backward, ms", ".3f"],
                 ["forward_times", "forward: ligertune's speed over it", ".2f"],
                 ["both_times", "both: ligertune's speed over it", ".2f"],
                 ["kept_mib", "kept, MiB", ".0f"], ["peak_mib", "peak, MiB", ".0f"],
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
