"""`ligertune bench`: time every kernel against eager PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ligertune.cli.options import Json
from ligertune.cli.render import console as render
from ligertune.errors import UserError
from ligertune.progress import importing

if TYPE_CHECKING:
    from ligertune.bench.case import Mode
    from ligertune.bench.measure import Row

SHORT: dict[Mode, str] = {"forward": "fwd", "backward": "bwd", "both": "both"}
LEGEND = (
    "Milliseconds: median device time with cold caches. Spread: its 20 % and 80 % quantiles. Host: launch time on the "
    "CPU. GiB: peak memory above the inputs. Error: largest error of outputs and gradients against float64. "
    "Roof: share of the device's peak rate."
)


def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to time. Default: all.")] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="auto is bfloat16, or float32 on a CPU.")
    ] = "auto",
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Skip an implementation: eager, torch, torch.compile.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots of time and memory against size.")] = None,
    json: Json = False,
) -> None:
    """Time every kernel against eager code, torch and torch.compile, with memory, error and share of the roofline.

    Example: ligertune bench rms_norm swiglu --plots plots
    """
    with importing():
        from ligertune.bench.measure import BENCHMARKS, bench_op, default_setup, report_header

    render.people_on_stderr(json)
    if plots is not None:
        from ligertune.bench.bench_plots import check_matplotlib, draw
        from ligertune.planning.preflight import check_out_folder, make_out_folder

        check_matplotlib()
        check_out_folder(plots, "--plots", may_hold=None)
        make_out_folder(plots, "--plots")
    for op in ops or ():
        if op not in BENCHMARKS:
            raise UserError(f"There is no op {op!r}.", hint=f"The ops are {', '.join(BENCHMARKS)}.")
    setup = default_setup(dtype)
    header = report_header(setup)
    render.text(header["line"])
    render.sentence(LEGEND)
    done: list[Row] = []
    for op in ops or BENCHMARKS:
        rows = bench_op(op, setup, without=without or ())
        _show(rows)
        done += rows
        if plots is not None:
            render.text(f"Drawn: {draw(rows, plots, device=header['device'])}")
    if json:
        render.json_report({**header, "rows": [row.as_dict() for row in done]})


def _show(rows: list[Row]) -> None:
    """Print the table of one op, one block of lines per size; then failures and notes."""
    modes = list(rows[0].floors)
    case = rows[0].case
    header = ["ms", *(SHORT[mode] for mode in modes), "spread", "host", "GiB", "error", "roof"]
    lines = []
    for label, block in groupby(rows, key=lambda row: row.case.label):
        lines += [[label], *(_cells(row, modes) for row in block)]
    render.text()
    render.columns(f"{case.op}, {str(case.dtype).removeprefix('torch.')}", header, lines)
    for row in rows:
        if row.failure:
            render.sentence(f"{row.case.label}, {row.provider} failed: {row.failure}", indent="  ")
        for note in row.notes:
            render.sentence(f"{row.case.label}, {row.provider}: {note}", indent="  ")


def _cells(row: Row, modes: Sequence[Mode]) -> list[str]:
    if row.failure:
        return [f"  {row.provider}", "failed"]
    # the last mode is the whole op, forward and backward
    timing = row.device[modes[-1]]
    share = row.share(modes[-1])
    return [
        f"  {row.provider}",
        *(f"{1e3 * row.device[mode].median:.3g}" for mode in modes),
        f"{100 * timing.p20 / timing.median:.0f}-{100 * timing.p80 / timing.median:.0f}%",
        f"{1e3 * row.host[modes[-1]].median:.3g}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.3g}",
        "" if row.error is None else f"{row.error:.1e}",
        "" if share is None else f"{100 * share:.0f}%",
    ]
