"""Benchmark the experts of one layer, forward and backward, against transformers and other libraries; a page of them.

    scripts/bench experts [--only mixtral,qwen3,deepseek,gpt_oss] [--tokens 2048,8192,32768] [--page docs/benchmarks]
    scripts/bench experts --from FILE --page docs/benchmarks

    mixtral   X 8, K 2, E 4096, F 14336          deepseek  X 256, K 8, E 7168, F 2048
    qwen3     X 128, K 8, E 2048, F 768          gpt_oss   X 32, K 4, E 2880, F 2880, biases, interleaved, clamped

X experts of which a token uses K, hidden size E, F columns of gate and of up. Random bfloat16 weights and tokens; the
router's choice is random (--skew makes some experts more popular). Sides: ligertune, and the same with each kind of
product; transformers' `eager` and `grouped_mm`; liger-kernel, SonicMoE (as transformers calls it) and ScatterMoE where
they are installed. Each side runs in a process of its own, on the same shapes in the same order, for at most --limit
seconds. Times are medians of --repeats, by CUDA events. Six minutes on an H100.

Each side's output and gradients are compared with float32, on 8 experts and 512 tokens of the same widths. --small runs
tiny shapes on a CPU, with the kernels in Triton's interpreter, to test the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from dataclasses import replace

from benchmarks import pages, processes
from benchmarks.pages import GIB
from benchmarks.sides.experts import NEEDS, OURS, SIDES, layer_of, parameters_of
from benchmarks.tables.expert_shapes import SHAPES, Shape

CHECK_EXPERTS, CHECK_TOKENS = 8, 512


def main() -> int:
    options = parse()
    if options.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if options.line:
        return measure_side(options, options.line)
    points, left_out = [], []
    sides, missing = chosen_sides(options)
    for side in sides:
        found, reasons = run_side(options, side)
        points, left_out = points + found, left_out + reasons
    page(options, points, missing + left_out)
    ours = [point for point in points if point["side"] == "ligertune"]
    return 0 if len(ours) == len(cases(options)) or not options.small else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SHAPES), help="comma-separated shapes")
    parser.add_argument("--tokens", help="comma-separated (default: 2048,8192,32768)")
    parser.add_argument("--sides", help=f"separated by semicolons: {'; '.join(SIDES)}")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--skew", type=float, default=0.0, help="exponent of the experts' popularity: 1 is Zipf's law")
    parser.add_argument("--frozen", action="store_true", help="experts that do not train: no gradients of weights")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds of a side")
    parser.add_argument("--small", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--line", metavar="SIDE", help=argparse.SUPPRESS)
    options = pages.parse(parser)
    options.tokens = options.tokens or ("64" if options.small else "2048,8192,32768")
    if options.small:
        options.repeats = 1
    unknown = set(options.only.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    return options


def cases(options: argparse.Namespace) -> list[tuple[str, Shape, int]]:
    """Return (name, shape, tokens) of all measurements, in their order."""
    shapes = {name: SHAPES[name] for name in options.only.split(",")}
    if options.small:
        shapes = {name: replace(one, number=4, chosen=2, hidden=64, mlp=48) for name, one in shapes.items()}
    return [(name, one, tokens) for name, one in shapes.items() for tokens in map(int, options.tokens.split(","))]


def chosen_sides(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the sides that can run here, and why others cannot."""
    wanted = [side.strip() for side in options.sides.split(";")] if options.sides else list(SIDES)
    missing = [side for side in wanted if side in NEEDS and importlib.util.find_spec(NEEDS[side]) is None]
    return [side for side in wanted if side not in missing], [f"Without rows: {s} (not installed)." for s in missing]


# ---- processes


def run_side(options: argparse.Namespace, side: str) -> tuple[list[dict], list[str]]:
    """Measure a side in a new process. Returns its points, and why others are missing."""
    command = processes.again("--line", side)
    points, reason = processes.run(command, limit=options.limit, show=lambda point: print(words(point), flush=True))
    said = [why(point) for point in points if "failed" in point] + ([f"{side}: {reason}."] if reason else [])
    return [point for point in points if "failed" not in point], said


def why(point: dict) -> str:
    return f"Without a row: {point['side']}, {point['shape']}, {point['tokens']:,} tokens ({point['failed']})."


def words(point: dict) -> str:
    place = f"{point['side']}, {point['shape']}, {point['tokens']:,} tokens"
    if "failed" in point:
        return f"{place}: {point['failed']}"
    floor = f", {point['floor']:.0%} of the floor" if point.get("floor") else ""
    return (f"{place}: {point['ms']:.2f} ms{floor}, kept {point['kept'] / GIB:.3f} GiB, "
            f"peak {point['peak'] / GIB:.2f} GiB, error {point['error']:.1e}")  # fmt: skip


# ---- one side


def measure_side(options: argparse.Namespace, side: str) -> int:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    errors: dict[str, float] = {}
    for name, shape, tokens in cases(options):
        known = {"side": side, "shape": name, "tokens": tokens}
        try:
            if name not in errors:
                errors[name] = error_of(side, name, shape, device)
            point = known | timed(options, side, name, shape, tokens, device) | {"error": errors[name]}
        except torch.OutOfMemoryError:
            point = known | {"failed": "out of memory"}
        except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, NotImplementedError) as error:
            point = known | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"}
        processes.say(point)
        if device == "cuda":
            torch.cuda.empty_cache()
    return 0


def inputs_of(options_skew: float, shape: Shape, tokens: int, device: str, dtype):
    """Return hidden (N, E), index (N, K), weights (N, K) and the gradient of the output (N, E)."""
    import torch

    generator = torch.Generator(device).manual_seed(1)
    hidden, dout = (torch.randn(tokens, shape.hidden, device=device, generator=generator).to(dtype) for _ in range(2))
    logits = torch.randn(tokens, shape.number, device=device, generator=generator)
    logits -= options_skew * torch.arange(1, shape.number + 1, device=device).log()
    values, index = logits.softmax(-1).topk(shape.chosen)
    weights = (values / values.sum(-1, keepdim=True)).to(dtype)
    return hidden.requires_grad_(), index, weights.requires_grad_(), dout


def error_of(side: str, name: str, shape: Shape, device: str) -> float:
    """Return the largest relative error of output and gradients against eager in float32, on few experts."""
    import torch

    few = replace(shape, number=min(CHECK_EXPERTS, shape.number), chosen=min(shape.chosen, CHECK_EXPERTS // 2))
    results = []
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32, torch.float32)
    for one, dtype in zip(("eager", side), dtypes, strict=True):
        module, function = layer_of(one, name, few, device, dtype)
        for parameter in module.parameters():  # the same rounded values on both sides
            parameter.data.copy_(parameter.data.to(torch.bfloat16))
        hidden, index, weights, dout = inputs_of(
            0.0, few, CHECK_TOKENS // (1 if device == "cuda" else 8), device, dtype
        )
        hidden.data.copy_(hidden.data.to(torch.bfloat16))
        weights.data.copy_(weights.data.to(torch.bfloat16))
        dout = dout.to(torch.bfloat16).to(dtype)
        out = function(hidden, index, weights)
        taken = [p for p in module.parameters() if side != "scattermoe"]
        results.append([out, *torch.autograd.grad(out, [hidden, weights, *taken], dout)])
        del module
    if side == "scattermoe":
        return float("nan")
    pairs = zip(*results, strict=True)
    return max(((b.double() - a.double()).norm() / a.double().norm()).item() for a, b in pairs)


def timed(options: argparse.Namespace, side: str, name: str, shape: Shape, tokens: int, device: str) -> dict:
    """Return milliseconds of forward and backward, kept activations and peak memory above weights and inputs."""
    import torch

    from ligertune.hardware import this_machine

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    module, function = layer_of(side, name, shape, device, dtype)
    module.requires_grad_(not options.frozen)
    hidden, index, weights, dout = inputs_of(options.skew, shape, tokens, device, dtype)
    used = [hidden, weights, *(p for p in parameters_of(side, module) if p.requires_grad)]
    kept = peak = 0
    seconds = []
    for turn in range(options.repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, marks = torch.cuda.memory_allocated(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
        start = time.perf_counter()
        out = function(hidden, index, weights)
        if device == "cuda" and turn == 1:
            kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        gradients = torch.autograd.grad(out, used, dout)
        if device == "cuda":
            marks[1].record()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            seconds.append(marks[0].elapsed_time(marks[1]) / 1e3)
        else:
            seconds.append(time.perf_counter() - start)
        del out, gradients
    ms = 1e3 * statistics.median(seconds[2:])
    best = this_machine().peak_flops
    floor = None if best is None or options.frozen else 1e3 * shape.flops(tokens) / best / ms
    return {"ms": ms, "kept": kept, "peak": peak, "floor": floor, "tflops": shape.flops(tokens) / ms / 1e9}


# ---- page


def page(options: argparse.Namespace, points: list[dict], left_out: list[str]) -> None:
    if not points:
        print("\n".join(["nothing was measured", *left_out]))
        return
    theirs = {(p["shape"], p["tokens"]): p for p in points if p["side"] == "grouped_mm"}
    skewed = f", with skew {options.skew}" if options.skew else ""
    fixed = any(point["side"].startswith("ligertune, ") for point in points)
    rows = []
    order = {name: i for i, name in enumerate(SHAPES)}
    for point in sorted(points, key=lambda p: (order[p["shape"]], p["tokens"])):
        other = theirs.get((point["shape"], point["tokens"]))
        more = {"kept_gib": point["kept"] / GIB, "peak_gib": point["peak"] / GIB, "ours": point["side"] in OURS,
                "about": f"{point['shape']}, {point['tokens']:,} tokens"}  # fmt: skip
        if other:
            more |= {
                "times": other["ms"] / point["ms"],
                "less": point["kept"] / other["kept"] if other["kept"] else None,
            }
        rows.append({**point, **more})
    pages.publish(
        options,
        page="moe" + "_small" * options.small,
        title="Experts of one layer, forward and backward" + " (with --small: tiny shapes)" * options.small,
        intro="This page compares the experts of one layer of a mixture, without router and shared experts.",
        caveats=[
            f"Weights, tokens and the router's choice are random, in bfloat16{skewed}.",
            "mixtral: X 8, K 2, E 4096, F 14336. qwen3: Qwen3-30B-A3B, X 128, K 8, E 2048, F 768. gpt_oss: "
            "gpt-oss-20b, X 32, K 4, E 2880, F 2880. deepseek: DeepSeek-V3, X 256, K 8, E 7168, F 2048.",
            "grouped_mm and eager are transformers' implementations."
            + (" `ligertune, ...` fixes the products that ligertune otherwise chooses by shape." if fixed else ""),
            "Kept: memory after the forward less that before, without the output. Peak: above weights and inputs, with "
            "all gradients. Floor: FLOPs of the products at the device's peak for dense bfloat16.",
            "Error: the largest relative error (norm) of output and gradients against transformers' eager code in "
            f"float32, on {CHECK_EXPERTS} experts and {CHECK_TOKENS} tokens of the same widths.",
            f"Each side ran in its own process; medians of {options.repeats}. "
            + ("The experts are frozen." if options.frozen else "All weights train."),
        ],
        columns=[["shape", "shape", ""], ["tokens", "tokens", ",d"], ["side", "side", ""], ["ms", "ms", ".2f"],
                 ["times", "times grouped_mm", ".2f"], ["tflops", "TFLOP/s", ".0f"], ["floor", "of the floor", ".0%"],
                 ["kept_gib", "kept GiB", ".3f"], ["less", "kept / grouped_mm's", ".2f"],
                 ["peak_gib", "peak GiB", ".2f"],
                 ["error", "error", ".1e"]],
        rows=rows,
        left_out=left_out,
        remarks=remarks(rows),
        chart={"kind": "bars", "labels": ["side"], "group": "about", "values": {
            "tflops": "TFLOP/s of the products (more is better)",
            "kept_gib": "kept activations, GiB (less is better)"}},
    )  # fmt: skip


def remarks(rows: list[dict]) -> list[str]:
    """Return the medians of our side against grouped_mm, and where another side is faster."""
    ours = {(row["shape"], row["tokens"]): row for row in rows if row["side"] == "ligertune"}
    said = []
    times = [row["times"] for row in ours.values() if row.get("times")]
    if times:
        less = [row["less"] for row in ours.values() if row.get("less")]
        kept = f", at {statistics.median(less):.2f} of its kept activations" if less else ""
        said.append(f"In the median ligertune is {statistics.median(times):.2f} times as fast as grouped_mm{kept}.")
    for (shape, tokens), row in ours.items():
        best = min((r for r in rows if (r["shape"], r["tokens"]) == (shape, tokens)), key=lambda r: r["ms"])
        if best["ms"] < 0.98 * row["ms"]:
            said.append(
                f"{shape}, {tokens:,} tokens: {best['side']} is faster, {best['ms']:.2f} ms against {row['ms']:.2f}."
            )
    return said
