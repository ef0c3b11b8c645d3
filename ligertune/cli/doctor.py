"""`ligertune doctor`: check the installation, the device and, with `--kernels`, the kernels' numerics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import Json
from ligertune.cli.render import console as render

if TYPE_CHECKING:
    from ligertune.bench.kernel_check import Check


def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compare every kernel with float64 on this device; takes a minute.")
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine, and print the command that fixes each problem. Exit code 1 if a kernel is wrong.

    Example: ligertune doctor --kernels
    """
    from ligertune.doctor.examine import examine

    render.people_on_stderr(json)
    findings = examine()
    render.table("This machine", [(f.what, f"{'ok' if f.ok else 'warning':8s} {f.value}") for f in findings])
    for finding in findings:
        if not finding.ok:
            render.text(f"\nwarning: {finding.what}: {finding.advice}.")
            if finding.command:
                render.text(f"  {finding.command}")
    checks = _check_kernels() if kernels else []
    good = all(check.good for check in checks)
    if json:
        report = {"ok": good and all(f.ok for f in findings), "findings": [f.as_dict() for f in findings]}
        render.json_report({**report, **({"kernels": [check.as_dict() for check in checks]} if kernels else {})})
    if not good:
        raise typer.Exit(1)


def _check_kernels() -> list[Check]:
    """Compare every kernel with float64, and print one line per op and dtype."""
    import torch

    from ligertune.bench.kernel_check import check_ops, dtypes_to_check
    from ligertune.hardware import this_machine

    machine, done = this_machine(), []
    with render.status("checking the kernels ...") as status:
        for rows in check_ops(torch.device(machine.device), dtypes_to_check(machine)):
            done += rows
            status.update(f"checking the kernels: {len(done)} done, last {rows[0].case.op}")
    render.text()
    render.columns("Kernels against float64", ["", "dtype", "", "relative error", "allowed"], _lines(done))
    wrong = sum(not check.good for check in done)
    seconds = sum(check.seconds for check in done)
    render.text(
        f"{len(done)} checks in {seconds:.0f} s: " + (f"{wrong} WRONG" if wrong else "all within their tolerance")
    )
    return done


def _lines(checks: list[Check]) -> list[list[str]]:
    """Return a table line for the worst case of each op and dtype."""
    of_op: dict[tuple, list[Check]] = {}
    for check in checks:
        of_op.setdefault((check.case.op, check.case.dtype), []).append(check)
    lines = []
    for (op, dtype), rows in of_op.items():
        worst = max(rows, key=lambda check: (not check.good, check.error is None, check.error or 0.0))
        result = f"{worst.case.label}, {worst.form}: {worst.failure}" if worst.failure else f"{worst.error:.1e}"
        verdict = "ok" if worst.good else "WRONG"
        lines.append([op, str(dtype).removeprefix("torch."), verdict, result, f"{worst.bound:g}"])
    return lines
