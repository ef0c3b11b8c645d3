"""Benchmark causal attention within packed documents, forward and backward, against torch and FlashAttention.

    scripts/bench attention [--only 64,128,256,160x100,...] [--sides ligertune,varlen,...] [--page docs/benchmarks]
    scripts/bench attention --from FILE --page docs/benchmarks

Rows of equal documents: 160 x 100, 32 x 512, 8 x 2048, 4 x 4096, 1 x 16384 and 1 x 65536 tokens, bfloat16. Heads of 64
and 128: 32 for queries, 8 for keys and values; heads of 256: 16 and 4. Sides:

    ligertune   document_attention, which is told how many documents there are
    short       document_attention, which is not: the kernels of short documents (only if --sides names it)
    sdpa        torch's scaled_dot_product_attention on a batch of the documents, with the backend that it chooses
    cudnn       the same with cuDNN's backend        flash   the same with FlashAttention-2's backend
    varlen      torch's FlashAttention-2 over the packed row, its backward not deterministic
    flex        flex_attention, compiled, with a block mask: heads of 64 and 128, 8 x 2048 and 1 x 16384
    fa3, fa4    flash_attn_interface and flash_attn.cute, where they are installed
    fa4_same    the latter with the same bits in every run
    auto        what kernels.attention: auto runs with train.full_determinism: false, where that is not the first side

All sides run in one process on the same tensors, in two rounds, the second in reverse order, because a GPU's clock
changes by some percent within seconds. A row is printed when it is measured. Times are medians of --repeats runs by
CUDA events, or of as many as take --seconds, at least 4. The results of each side are compared with those of the
first. After --budget seconds no further side starts.

Then the errors of output and gradients against float64 are measured on documents of different lengths, and whether
5 runs have the same bits. --small runs tiny shapes on a CPU, with the kernels' PyTorch reference, to test the script.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks import pages, processes
from benchmarks.sides.attention import ERROR_SIDES, SIDES, Case, Row, Side, call_of, row_of
from ligertune.attention import flash_4

HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 4)}  # width -> heads of queries, of keys and values
SIZES = ((160, 100), (32, 512), (8, 2048), (4, 4096), (1, 16384), (1, 65536))  # documents, tokens of each
SMALL_HEADS, SMALL_SIZES = {16: (4, 2), 32: (4, 2)}, ((3, 10), (2, 40))
FLEX_HEADS, FLEX_SIZES = (64, 128), ((8, 2048), (1, 16384), *SMALL_SIZES)  # each compilation takes 10 to 20 s
# documents whose errors are measured; together long enough for the kernels of long documents
UNEVEN, SMALL_UNEVEN, UNEVEN_HEADS = (700, 1, 64, 283, 2100, 1300), (7, 1, 4, 30), (8, 2)
PARTS = ("out", "dq", "dk", "dv")
RUNS = 5  # whose bits are compared
SAME = 0.03  # largest relative difference of two sides' results: bfloat16 explains less than 0.01
FILL = 8192  # size of the products that keep the GPU busy while the host queues what is timed
OURS = {SIDES[name].label for name in ("ligertune", "auto", "short")}


def main() -> int:
    options = parse()
    if options.line:
        for point in measure(options):
            processes.say(point)
        return 0
    command = processes.again("--line")
    points, reason = processes.run(
        command, limit=options.budget + 60, show=lambda point: print(words(point), flush=True)
    )
    return page(options, points, reason)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated widths of heads and sizes: 128,8x2048 (default: all)")
    usual = ",".join(name for name in SIDES if name != "short")
    parser.add_argument("--sides", default=usual, help=f"comma-separated: {', '.join(SIDES)}")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.4, help="of the timed runs of one side, where 4 take less")
    parser.add_argument("--budget", type=float, default=240, help="seconds after which no side starts")
    parser.add_argument("--small", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--line", action="store_true", help=argparse.SUPPRESS)
    options = pages.parse(parser, join_runs)
    heads, sizes = (SMALL_HEADS, SMALL_SIZES) if options.small else (HEADS, SIZES)
    wanted = options.only.split(",") if options.only else []
    widths = [width for width in heads if str(width) in wanted] or list(heads)
    chosen = [size for size in sizes if "{}x{}".format(*size) in wanted] or sizes
    options.cases = [Case(width, heads[width], (n,) * count) for width in widths for count, n in chosen]
    options.side_names = options.sides.split(",")
    unknown = set(wanted) - {str(width) for width in heads} - {"{}x{}".format(*size) for size in sizes}
    unknown |= set(options.side_names) - set(SIDES)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; see --help")
    return options


# ---- measurements, in their own process


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a point per side and case, then the errors; of what failed or was left out, the reason."""
    import torch

    began, device = time.perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    sides = [SIDES[name] for name in options.side_names]
    for side in sides:
        if not side.installed:
            yield {"side": side.label, "failed": f"{side.needs} is not installed"}
    for case in dict.fromkeys(Case(c.width, UNEVEN_HEADS, uneven(options)) for c in options.cases):
        yield from errors(case, device)
    for case in options.cases:
        row = row_of(case, device)
        there = [side for side in sides if side.installed and runs(side, case, row)]
        yield from compared(case, row, there, options, until=began + options.budget)
        release(device)
        del row


def compared(case: Case, row: Row, sides: list[Side], options: argparse.Namespace, *, until: float) -> Iterator[dict]:
    """Yield a point per side of a row. until: the time from which no further side starts."""
    points, calls, times, expected = [], {}, {}, None
    for side in sides:
        points.append({"side": side.label, "width": case.width, "documents": case.size[0], "length": case.size[1]})
        if time.perf_counter() > until:
            points[-1]["failed"] = f"the {options.budget:.0f} s of --budget were spent"
            continue
        with guarded(points[-1]):
            call, packed = call_of(side, row)
            found = [packed(t.detach()) for t in call()]  # compiles
            expected = expected or found
            points[-1]["differs"] = max(differences(found, expected))
            calls[side.label] = call
        found = None
        release(row.starts.device.type)
    for labels in (list(calls), list(calls)[::-1]):
        for label in labels:
            with guarded(next(point for point in points if point["side"] == label)):
                times.setdefault(label, []).extend(timed(calls[label], row.starts.is_cuda, options))
    for point in points:
        yield point if "failed" in point else point | rates(case, times[point["side"]])


def uneven(options: argparse.Namespace) -> tuple[int, ...]:
    return SMALL_UNEVEN if options.small else UNEVEN


def runs(side: Side, case: Case, row: Row) -> bool:
    if side is SIDES["auto"]:
        return flash_4.takes(*row.tensors[:3], documents=len(case.lengths))
    return side is not SIDES["flex"] or (case.width in (*FLEX_HEADS, *SMALL_HEADS) and case.size in FLEX_SIZES)


@contextlib.contextmanager
def guarded(point: dict) -> Iterator[None]:
    """Write the reason of a failure into the point: other sides go on, and the page names it."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        point["failed"] = "out of memory"
    except Exception as error:  # sides raise what they like
        lines = str(error).strip().splitlines()
        point["failed"] = f"{type(error).__name__}: {lines[0][:150] if lines else ''}"


def release(device: str) -> None:
    import torch

    if device == "cuda":
        with contextlib.suppress(RuntimeError):  # a broken kernel's error comes with each later call
            torch.cuda.empty_cache()


def timed(call: Callable, cuda: bool, options: argparse.Namespace) -> list[list[float]]:
    """Return [forward, backward, both] in ms of each run of one round."""
    import torch

    synchronize = torch.cuda.synchronize if cuda else lambda: None

    def now():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    repeats = int(min(max(1, options.repeats / 2), max(2, options.seconds / 2 / (time.perf_counter() - start))))
    if cuda:  # work for the GPU until the host has queued the runs: short kernels are not timed with the host's pauses
        filling = torch.ones(FILL, FILL, device="cuda", dtype=torch.bfloat16)
        for _ in range(8):
            filling @ filling
        del filling
    marks = []
    for _ in range(repeats):
        places = [now()]
        call(lambda places=places: places.append(now()))
        marks.append([*places, now()])
    synchronize()

    def ms(a, b) -> float:
        return a.elapsed_time(b) if cuda else 1e3 * (b - a)

    return [[ms(a, b), ms(b, c), ms(a, c)] for a, b, c in marks]


def rates(case: Case, times: list[list[float]]) -> dict:
    """Return medians in ms, and TFLOP/s."""
    medians = dict(zip(("forward", "backward", "both"), map(statistics.median, zip(*times, strict=True)), strict=True))
    factors = {"forward": 1.0, "backward": 2.5, "both": 3.5}
    speeds = {f"{name}_tflops": factors[name] * case.flops() / ms / 1e9 for name, ms in medians.items()}
    return {f"{name}_ms": ms for name, ms in medians.items()} | speeds | {"runs": len(times)}


def differences(found: list, expected: list) -> list[float]:
    """Return the relative differences (norm) of output and gradients."""
    pairs = ((a.double(), b.double()) for a, b in zip(found, expected, strict=True))
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


def errors(case: Case, device: str) -> Iterator[dict]:
    """Yield the errors of ours and of flash attention against float64, and whether some runs have the same bits."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    row = row_of(case, device)
    leaves = [t.double().requires_grad_() for t in row.tensors[:3]]
    documents = zip(*(t.split(case.lengths) for t in leaves), strict=True)

    def attend(*one):
        batch = (t.transpose(0, 1)[None] for t in one)
        return scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    out = torch.cat([attend(*one) for one in documents])
    expected = [out, *torch.autograd.grad(out, leaves, row.tensors[3].double())]
    for side in ERROR_SIDES:
        point = {"of": side.label, "width": case.width, "lengths": case.lengths}
        with guarded(point):
            call, _ = call_of(side, row)
            results = [call() for _ in range(RUNS)]
            point["errors"] = differences(results[0], expected)
            point["same"] = all(all(map(torch.equal, results[0], other)) for other in results[1:])
        yield point


# ---- page


def words(point: dict) -> str:
    if "of" in point:
        return f"errors, heads of {point['width']}, {point['of']}: {point.get('failed') or error_words(point)}"
    place = point["side"]
    if "length" in point:
        place += f", heads of {point['width']}, {point['documents']} x {point['length']:,}"
    if "failed" in point:
        return f"{place}: {point['failed']}"
    return (f"{place}: {point['forward_ms']:.3f} + {point['backward_ms']:.3f} = {point['both_ms']:.3f} ms, "
            f"{point['forward_tflops']:.0f}, {point['backward_tflops']:.0f}, {point['both_tflops']:.0f} TFLOP/s, "
            f"differs by {point['differs']:.1e}")  # fmt: skip


def error_words(point: dict) -> str:
    parts = ", ".join(f"{name} {error:.2e}" for name, error in zip(PARTS, point["errors"], strict=True))
    return f"{parts}, {RUNS} runs with {'the same bits' if point['same'] else 'different bits'}"


def page(options: argparse.Namespace, points: list[dict], reason: str | None) -> int:
    """Publish the page. Returns 0 if ours has all its rows, and no result or error of ours is worse than it may be."""
    errors_found = [point for point in points if "of" in point]
    rows = rows_of([point for point in points if "both_ms" in point])
    if not rows:
        print("\n".join(["nothing was measured", *left_out(points, reason)]))
        return 1
    widths = list(dict.fromkeys(row["width"] for row in rows))
    pages.publish(
        options,
        page="attention" + "_small" * options.small,
        title="Causal attention within packed documents" + " (with --small: tiny shapes)" * options.small,
        intro="This page compares `document_attention` with torch's attention and FlashAttention, forward and "
        "backward, by the length of the documents.",
        caveats=caveats(options),
        columns=[["width", "head width", ""], ["about", "documents", ""], ["side", "side", ""],
                 ["forward_ms", "forward, ms", ".3f"], ["backward_ms", "backward, ms", ".3f"],
                 ["both_ms", "together, ms", ".3f"], ["forward_tflops", "forward, TFLOP/s", ".0f"],
                 ["backward_tflops", "backward, TFLOP/s", ".0f"], ["both_tflops", "together, TFLOP/s", ".0f"],
                 ["fastest", "fastest other side", ""], ["times", "times its speed", ".2f"]],
        rows=rows,
        left_out=left_out(points, reason),
        remarks=[*speed_remarks(rows), *error_remarks(errors_found)],
        chart={"kind": "lines", "x": ["length", "tokens of a document"], "colour": "side",
               "values": {f"tflops_{width}": f"TFLOP/s, heads of {width}" for width in widths}},
    )  # fmt: skip
    found = {_place(row) for row in rows if row["side"] == SIDES["ligertune"].label}
    complete = "ligertune" not in options.side_names or len(found) == len(options.cases)
    right = all(row["differs"] < SAME for row in rows) and all(
        point.get("same") for point in errors_found if point["of"].startswith("ligertune")
    )
    return 0 if complete and right and not reason else 1


def join_runs(found: list[dict]) -> dict:
    """Join the pages of several runs, of which each measured some shapes, and name the rows that none has."""
    page = pages.joined(found, ("width", "about"))
    rows = rows_of(page["rows"])
    places = {_place(row): None for row in rows}
    there = {(row["side"], *_place(row)) for row in rows}
    missing = [{"side": side.label, "width": width, "documents": documents, "length": length, "failed": "not run"}
               for name, side in SIDES.items() if name not in ("flex", "auto")
               for width, documents, length in places
               if (side.label, width, documents, length) not in there
               and any(row["side"] == side.label for row in rows)]  # fmt: skip
    return page | {
        "rows": rows,
        "remarks": [*speed_remarks(rows), *(said for said in page["remarks"] if said.startswith("Relative errors"))],
        "left_out": [*(said for said in page["left_out"] if "--budget" not in said), *left_out(missing, None)],
        "chart": page["chart"]
        | {"values": {key: name for one in found for key, name in one["chart"]["values"].items()}},
    }


def caveats(options: argparse.Namespace) -> list[str]:
    heads = SMALL_HEADS if options.small else HEADS
    shapes = "; ".join(f"{width} wide, {queries} and {keys}" for width, (queries, keys) in heads.items())
    said = [
        f"Random bfloat16 tensors. Heads of queries and of keys: {shapes}.",
        "All documents of a row have one length. SDPA's sides compute them as a batch, which real rows seldom are; the "
        "others take the packed row.",
        "One process ran all sides of a row, in two rounds, the second in reverse order. Medians of up to "
        f"{options.repeats} runs by CUDA events, of 4 where documents are longest; the GPU's time, without the host's. "
        "Small differences may be noise.",
        "TFLOP/s count the pairs of tokens that attend: two products forward, five backward. The chart shows those "
        "of forward and backward together.",
        "ligertune's gradients have the same bits in every run. Those of torch varlen, of FlashAttention and of "
        "ligertune with `full_determinism: false` need not, unless the side's name says deterministic.",
    ]
    if "flex" in options.side_names:
        sizes = " and ".join(f"{count} x {n:,}" for count, n in FLEX_SIZES[:2])
        said.append(f"flex_attention only for heads of 64 and 128 and {sizes}: each compilation takes 10 to 20 s. "
                    "Neither it nor building the block mask is timed.")  # fmt: skip
    return said


def rows_of(points: list[dict]) -> list[dict]:
    """Return the rows by head width, length and side; ours are compared with the fastest other side."""
    order, groups = [side.label for side in SIDES.values()], {}
    for point in points:
        groups.setdefault((point["width"], point["length"], point["documents"]), []).append(point)
    rows = []
    for (width, length, documents), group in sorted(groups.items()):
        others = [point for point in group if point["side"] not in OURS]
        best = min(others, key=lambda point: point["both_ms"], default=None)
        for point in sorted(group, key=lambda point: order.index(point["side"])):
            row = {**point, "about": f"{documents} x {length:,}", "ours": point["side"] in OURS,
                   f"tflops_{width}": point["both_tflops"]}  # fmt: skip
            if best and row["ours"]:
                row |= {"fastest": best["side"], "times": best["both_ms"] / point["both_ms"]}
            rows.append(row)
    return rows


def left_out(points: list[dict], reason: str | None) -> list[str]:
    """Return a sentence per side and reason without a row."""
    places: dict[tuple[str, str], list[str]] = {}
    for point in (point for point in points if "failed" in point):
        place = f"heads of {point['width']}" if "width" in point else ""
        place += f", {point['documents']} x {point['length']:,}" if "length" in point else ""
        side = f"the errors of {point['of']}" if "of" in point else point["side"]
        places.setdefault((side, point["failed"]), []).append(place)
    said = [f"Without a row: {side}{': ' if any(which) else ''}{'; '.join(which)} ({why.rstrip('.')})."
            for (side, why), which in places.items()]  # fmt: skip
    return [*said, f"The run ended early: {reason}."] if reason else said


def speed_remarks(rows: list[dict]) -> list[str]:
    """Return how ours compares with the fastest other side, and where it is slower."""
    mine = [row for row in rows if row["side"] == SIDES["ligertune"].label and "times" in row]
    said = []
    if mine:
        times = [row["times"] for row in mine]
        spread = f"{min(times):.2f} to {max(times):.2f} times, in the median {statistics.median(times):.2f} times"
        said.append(f"Forward and backward together, ligertune is {spread} as fast as the fastest other side.")
        behind = [f"{row['about']} with heads of {row['width']} ({row['times']:.2f}, {row['fastest']})"
                  for row in mine if row["times"] < (1.0 if row["length"] < 2048 else 0.95)]  # fmt: skip
        said.append("Rows in which it is slower than the fastest other side, by any amount below 2,048 tokens and by "
                    f"over 5 % from 2,048 tokens on: {'; '.join(behind) or 'none'}.")  # fmt: skip
    said += [*_deterministic_remarks(rows, mine), *_auto_remarks(rows, mine)]
    worst = max(rows, key=lambda row: row["differs"])
    place = f"{worst['side']}, {worst['about']} with heads of {worst['width']}"
    said.append(f"Output and gradients of the sides differ by at most {worst['differs']:.1e}, relative ({place}).")
    return said


def _deterministic_remarks(rows: list[dict], mine: list[dict]) -> list[str]:
    there = {_place(row): row["both_ms"] for row in rows if row["side"] == SIDES["fa4_same"].label}
    times = [there[_place(row)] / row["both_ms"] for row in mine if _place(row) in there]
    if not times:
        return []
    return [f"ligertune is {min(times):.2f} to {max(times):.2f} times, in the median "
            f"{statistics.median(times):.2f} times as fast as FlashAttention-4 in its deterministic mode."]  # fmt: skip


def _auto_remarks(rows: list[dict], mine: list[dict]) -> list[str]:
    auto = {_place(row): row["times"] for row in rows if row["side"] == SIDES["auto"].label and "times" in row}
    if not auto:
        return []
    times = [auto.get(_place(row), row["times"]) for row in mine]
    return ["With `full_determinism: false`, where flash-attn-4 is installed, `auto` runs FlashAttention-4 in "
            f"{len(auto)} of the {len(mine)} rows. All rows are then {min(times):.2f} to {max(times):.2f} times, in "
            f"the median {statistics.median(times):.2f} times as fast as the fastest other side."]  # fmt: skip


def _place(row: dict) -> tuple[int, int, int]:
    return row["width"], row["documents"], row["length"]


def error_remarks(points: list[dict]) -> list[str]:
    """Return the errors of each head width, and how those of ours compare with flash attention's."""
    said = []
    for width in dict.fromkeys(point["width"] for point in points):
        found = [point for point in points if point["width"] == width and "errors" in point]
        if not found:
            continue
        lengths = ", ".join(f"{n:,}" for n in found[0]["lengths"])
        errors_of = "; ".join(f"{point['of']}: {error_words(point)}" for point in found)
        shape = f"{UNEVEN_HEADS[0]} and {UNEVEN_HEADS[1]} heads of {width}, documents of {lengths} tokens"
        text = f"Relative errors against float64, {shape}: {errors_of}."
        theirs = next((point for point in found if point["of"] == "torch varlen"), None)
        for point in found if theirs else []:
            if point is not theirs:
                ratios = [a / b for a, b in zip(point["errors"], theirs["errors"], strict=True)]
                text += f" {point['of']}: at most {max(ratios):.3f} times those of torch varlen."
        said.append(text)
    return said
