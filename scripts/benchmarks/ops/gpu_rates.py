"""Measure the rates of one GPU from which plans predict the time of a step: scripts/bench gpu_rates.

    scripts/bench gpu_rates [--write FOLDER] [--small]

FOLDER is ligertune/planning/time/rates, whose files are part of the package. Rates of kernels are shares of what the
measured copy and matmul rates allow; those of linear layers are of forward and backward in bfloat16. About a minute.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.pages import parse_arguments
from ligertune.bench.case import Case, Mode, Work
from ligertune.bench.clock import Timing
from ligertune.bench.measure import (
    BENCHMARKS,
    BenchSetup,
    BoundProvider,
    Repetitions,
    bench_setup,
    report_header,
    seeded_inputs,
)
from ligertune.planning.time.gpu_rates import file_name

WIDTHS = (1024, 2048, 4096, 8192)  # E; the layer's output is 4 E wide
TOKENS = (512, 2048, 8192, 32768)
HEAD_DIMS = (64, 128, 256)
DOCUMENTS = ((64, 128), (16, 512), (4, 2048), (1, 8192), (1, 32768))  # number, tokens of each
MIXTURES = ((8, 2, 4096, 14336), (128, 8, 2048, 768))  # X, K, E, F
EXPERT_TOKENS = (2048, 8192, 32768)
OURS = "ours"
# op, sizes, as its benchmark has them. All at the sizes of models of 1 to 8 B parameters.
OPS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("add_rms_norm", (8192, 2048)),
    ("add_rms_norm", (8192, 4096)),
    ("swiglu", (8192, 14336)),
    ("apply_rope", (8192,)),
    ("linear_cross_entropy", (2048, 2048, 128256)),
    ("linear_cross_entropy", (8192, 2048, 128256)),
    ("linear_cross_entropy", (8192, 4096, 128256)),
    *(
        ("document_attention", (documents, length, head_dim))
        for head_dim in HEAD_DIMS
        for documents, length in DOCUMENTS
    ),
    ("dequantize_nf4", (8, 28672, 4096)),
    ("gated_delta_rule", (1, 8192)),
    ("causal_conv1d", (1, 8192)),
)
ADAM_ELEMENTS = 500_000_000
SMALL_ELEMENTS = 10_000


def main() -> int:
    """Measure, print the rates as JSON, and write them with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the rates into this folder")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, to test the script")
    options = parse_arguments(parser)
    device = torch.device("cpu" if options.small else "cuda")
    dtype = torch.float32 if options.small else torch.bfloat16
    effort = Repetitions(1, 2, 0.05) if options.small else Repetitions(3, 10, 0.2)
    setup = bench_setup(device, dtype, effort)
    about = report_header(setup)
    found = {
        "device": about["device"],
        "date": about["date"],
        "versions": about["versions"],
        "copy": setup.rates.copy,
        "matmul": setup.rates.matmul,
        "linear": [linear_rate(setup, width, tokens) for width in WIDTHS for tokens in token_counts(options)],
        "experts": [expert_rate(setup, sizes) for sizes in mixture_sizes(options)],
        "shares": [share_of(setup, op, sizes) for op, sizes in (small_ops() if options.small else OPS)],
        "optimizer": optimizer_rate(setup, SMALL_ELEMENTS if options.small else ADAM_ELEMENTS),
    }
    text = json.dumps(found, indent=1) + "\n"
    print(text, flush=True)
    if options.write:
        (options.write / file_name(about["device"])).write_text(text, encoding="utf-8")
    return 0


def token_counts(options: argparse.Namespace) -> tuple[int, ...]:
    return TOKENS[:1] if options.small else TOKENS


def mixture_sizes(options: argparse.Namespace) -> Iterable[tuple[int, ...]]:
    if options.small:
        return BENCHMARKS["experts"].cpu_sizes
    return ((tokens, *sizes) for sizes in MIXTURES for tokens in EXPERT_TOKENS)


def small_ops() -> list[tuple[str, tuple[int, ...]]]:
    """Return each op once, at its smallest size for a CPU."""
    return [(op, BENCHMARKS[op].cpu_sizes[0]) for op in dict(OPS)]


def median(setup: BenchSetup, run) -> float:
    """Return the median seconds of repetitions that take `setup.repetitions.seconds` in all, or three."""
    for _ in range(setup.repetitions.warmup):
        run()
    once, host = setup.clock.time(run)
    repeats = min(max(3, math.ceil(setup.repetitions.seconds / once)), 50)
    return Timing.of([setup.clock.time(run, host)[0] for _ in range(repeats)]).median


def linear_rate(setup: BenchSetup, width: int, tokens: int) -> list[float]:
    """Return [E, tokens, FLOP/s] of the three products of a linear layer (E -> 4 E)."""
    x = torch.randn(tokens, width, device=setup.device, dtype=setup.dtype, requires_grad=True)
    weight = torch.randn(4 * width, width, device=setup.device, dtype=setup.dtype, requires_grad=True)
    dy = torch.randn(tokens, 4 * width, device=setup.device, dtype=setup.dtype)

    def products():
        return torch.autograd.grad(F.linear(x, weight), (x, weight), dy)

    return [width, tokens, 3 * 2.0 * tokens * width * 4 * width / median(setup, products)]


def share_of(setup: BenchSetup, op: str, sizes: tuple[int, ...]) -> list:
    """Return [op, sizes, share] of our kernel: the least time at the copy and matmul rates, over its time."""
    work, mode, seconds = timed(setup, op, sizes)
    return [op, list(sizes), work.floor(mode, setup.rates) / seconds]


def expert_rate(setup: BenchSetup, sizes: tuple[int, ...]) -> list[float]:
    """Return [square root of E F, tokens of an expert, FLOP/s] of a mixture, forward and backward."""
    tokens, number, chosen, width, inner = sizes
    work, _, seconds = timed(setup, "experts", sizes)
    return [math.sqrt(width * inner), tokens * chosen / number, sum(work.flops) / seconds]


def timed(setup: BenchSetup, op: str, sizes: tuple[int, ...]) -> tuple[Work, Mode, float]:
    """Return the work of our kernel, the passes that were timed, and their seconds."""
    benchmark = BENCHMARKS[op]
    case = Case(op, sizes, benchmark.dtype or setup.dtype)
    provider = next(one for one in benchmark.providers if one.name == OURS)
    bound = BoundProvider(provider, case, seeded_inputs(benchmark, case, setup.device))
    mode: Mode = "both" if "both" in benchmark.modes else benchmark.modes[0]
    with provider.within():
        bound.both()
        seconds = median(setup, bound.both if mode == "both" else bound.forward)
    return benchmark.work(case), mode, seconds


def optimizer_rate(setup: BenchSetup, elements: int) -> float:
    """Return bytes/s of a clipped step of torch's fused AdamW: weights, gradients and both moments in the dtype."""
    weight = torch.nn.Parameter(torch.randn(elements, device=setup.device, dtype=setup.dtype))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step():
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    # the norm reads the gradient, clipping reads and writes it; AdamW reads all four and writes three
    return (3 + 7) * elements * setup.dtype.itemsize / median(setup, step)
