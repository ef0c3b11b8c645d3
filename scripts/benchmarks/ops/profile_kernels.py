"""Time of each GPU launch of an op, of ligertune and of its peers, to see where the time above the floor goes.

    scripts/bench profile_kernels [--only linear_cross_entropy,rms_norm] [--providers ours,liger] [--most 8]

Forward + backward of rows of scripts/bench kernels under torch's profiler, one provider after another, each warmed up
and repeated for --seconds. The rate of matrix products is all FLOPs of the op over their time. Between launches the
device waits, or does work that the profiler does not name.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections import defaultdict

import ligertune_kernels
import torch

from benchmarks import pages
from benchmarks.sides import kernel_libraries
from ligertune.bench.case import Case, OpBenchmark, Provider, function
from ligertune.bench.cases.case_table import BENCHMARKS
from ligertune.bench.measure import BoundProvider, Repetitions, bench_setup, report_header

LOSS, NORMS = "linear_cross_entropy", ("rms_norm", "layer_norm")
LOSSES = ((8192, 4096, 128256), (4096, 3584, 152064), (16384, 2048, 128256))
CASES = (
    *(Case(LOSS, sizes, torch.bfloat16) for sizes in LOSSES),
    Case(LOSS, (8192, 4096, 128256), torch.bfloat16, frozen_head=True),
    Case(LOSS, (4096, 3584, 152064), torch.bfloat16, frozen_head=True),
    *(Case(op, (8192, width), torch.bfloat16) for op in NORMS for width in (4096, 8192, 16384)),
    *(Case("apply_rope", (tokens,), torch.bfloat16) for tokens in (8192, 16384)),
)  # fmt: skip
LEAN_CHUNK_BYTES = 1 << 27
LEAN = function("lean", lambda *args: ligertune_kernels.linear_cross_entropy(*args, chunk_bytes=LEAN_CHUNK_BYTES))
PRODUCT = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|splitk", re.IGNORECASE)


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("Error: no GPU here")
    here = bench_setup(torch.device("cuda"), torch.bfloat16, Repetitions(3, 3, 0.05))
    print(f"{report_header(here)['line']}, {time.strftime('%Y-%m-%d')}", flush=True)
    peers = kernel_libraries.providers()
    for case in CASES:
        if options.only and case.op not in options.only:
            continue
        benchmark = BENCHMARKS[case.op]
        work = benchmark.work(case)
        known = [*benchmark.providers, *peers.get(case.op, ()), *([LEAN] if case.op == LOSS else [])]
        print(f"\n`{case.op}` {case.label}: floor {1e3 * work.floor('both', here.rates):.3f} ms", flush=True)
        for provider in known:
            if provider.name in options.providers:
                try:
                    show(provider, benchmark, case, options)
                except (RuntimeError, ValueError) as problem:
                    print(f"  {provider.name}: {str(problem).splitlines()[0]}")
                gc.collect()
                torch.cuda.empty_cache()
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"type": lambda text: text.split(",")}
    parser.add_argument("--only", **names, help="these ops")
    parser.add_argument("--providers", **names, default=["ours", "lean", "torch.compile", "liger"])
    parser.add_argument("--seconds", type=float, default=0.3, help="duration of the profiled work")
    parser.add_argument("--most", type=int, default=8, help="launches shown per provider")
    return pages.parse_arguments(parser)


def show(provider: Provider, benchmark: OpBenchmark, case: Case, options: argparse.Namespace) -> None:
    """Print the launches of one provider, the longest first."""
    torch.manual_seed(0)
    run = BoundProvider(provider, case, benchmark.inputs(case, torch.device("cuda")))
    with provider.within():
        run.both()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            run.both()
        end.record()
        end.synchronize()
        repeats = max(3, round(options.seconds * 3e3 / begin.elapsed_time(end)))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            begin.record()
            for _ in range(repeats):
                run.both()
            end.record()
            end.synchronize()
    took = begin.elapsed_time(end) / repeats
    spent, counts = defaultdict(float), defaultdict(int)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.time_range.elapsed_us() / 1e3 / repeats
            counts[event.name] += 1
    products = sum(ms for name, ms in spent.items() if PRODUCT.search(name))
    rate = f" at {sum(benchmark.work(case).flops) / products / 1e9:.0f} TFLOP/s" if products else ""
    rest = sum(spent.values()) - products
    print(f"  {provider.name}: {took:.3f} ms, products {products:.3f}{rate}, other launches {rest:.3f}, "
          f"between them {took - products - rest:.3f}")  # fmt: skip
    for name, ms in sorted(spent.items(), key=lambda item: -item[1])[: options.most]:
        print(f"    {ms:8.3f} ms, {counts[name] / repeats:5.1f} x  {name[:90]}")
    sys.stdout.flush()
