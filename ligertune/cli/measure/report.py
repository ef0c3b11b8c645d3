"""`ligertune report`: runs side by side, as tables and as one page, or live while they train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import Json
from ligertune.cli.render import console as render
from ligertune.errors import UserError
from ligertune.progress import importing

if TYPE_CHECKING:
    from ligertune.report.compare_runs import RunFolder

PAGE = Path("runs.html")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.html", help=f"Page to write. Default: {PAGE}.", show_default=False),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine, and load it again while runs train.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="With --watch: port to listen on; 0: a free one. Default: 8010.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compare runs: losses and throughput in one chart each, results, settings that differ, and sample answers.

    Example: ligertune report runs/first runs/second --out compared.html
    """
    render.people_on_stderr(json)
    if watch and out is not None:
        raise UserError("--watch and --out: --watch serves the page and writes none.", hint="Leave one of them out.")
    if port is not None and not watch:
        raise UserError("--port is of --watch, which is not given.", hint="Add --watch, or leave --port out.")
    if watch:
        _watch(runs, 8010 if port is None else port, json=json)
        return
    from ligertune.files.storage import write_text
    from ligertune.planning.preflight import check_report_path

    page = out or PAGE
    check_report_path(page)
    with importing():
        from ligertune.report.compare_runs import as_report, read_runs, runs_page
    found = read_runs(runs)
    write_text(page, runs_page(found))
    _show(found)
    render.text(f"\nWrote {page}")
    if json:
        render.json_report({"page": str(page), **as_report(found)})


def _watch(runs: list[Path], port: int, *, json: bool) -> None:
    """Serve the page until Ctrl-C."""
    with importing():
        from ligertune.report.compare_runs import read_runs
        from ligertune.report.live_page import listen_for_page
    read_runs(runs)  # a wrong folder is reported here and not in the browser
    server = listen_for_page(port, runs)
    render.text(f"The page is at {server.url}; Ctrl-C ends it")
    if json:
        render.json_report({"address": server.url})
    server.serve_forever()


def _show(runs: list[RunFolder]) -> None:
    from ligertune.report.compare_runs import result_rows, setting_rows

    header = ["", *(run.name for run in runs)]
    render.columns("Results", header, [(name, *values) for name, values in result_rows(runs)])
    if len(runs) > 1:
        rows = [(key, *values) for key, values in setting_rows(runs)]
        render.text()
        if rows:
            render.columns("Settings that differ", header, rows)
        else:
            render.text("All settings are equal.")
