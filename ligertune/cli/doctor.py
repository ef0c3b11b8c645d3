"""`ligertune doctor`: check the installation, the device and, with `--kernels`, the kernels' numerics."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import Json
from ligertune.cli.render import console as render
from ligertune.progress import importing

if TYPE_CHECKING:
    from ligertune.bench.kernel_check import Check
    from ligertune.doctor.software import Finding


def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compare every kernel with float64 on this device; takes a minute.")
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine, and print the command that fixes each problem. Exit code 1 if a kernel is wrong.

    Example: ligertune doctor --kernels
    """
    render.people_on_stderr(json)
    findings = _examine()
    render.table("This machine", [(f.what, f"{'ok' if f.ok else 'warning':8s} {f.value}") for f in findings])
    for finding in findings:
        if not finding.ok:
            render.sentence(f"\nwarning: {finding.what}: {finding.advice}.")
            if finding.command:
                render.text(f"  {finding.command}")
    checks = _check_kernels() if kernels else []
    good = all(check.good for check in checks)
    if json:
        report = {"ok": good and all(f.ok for f in findings), "findings": [f.as_dict() for f in findings]}
        render.json_report({**report, **({"kernels": [check.as_dict() for check in checks]} if kernels else {})})
    if not good:
        raise typer.Exit(1)


def _examine() -> list[Finding]:
    """Run all checks except those of the kernels, in the order of the report."""
    from ligertune.doctor import gpu, host, software
    from ligertune.hardware import this_machine
    from ligertune.report import versions

    installed = versions()
    triton = software.triton_version(installed)
    first = [software.python(), *software.packages(installed)]
    # the checks of the device need torch
    if (broken := software.torch_that_fails()) is not None:
        return [*first, broken, *host.resources()]
    import torch

    machine = this_machine()
    return [
        *first,
        software.pairing(installed.get("torch", ""), triton, software.required_by_torch()),
        software.triton_owners(software.owners_of_triton()),
        software.bytecode(torch.__spec__.cached, writes=not sys.dont_write_bytecode),
        software.c_compiler(triton, needed=machine.vendor != "cpu"),
        gpu.device(machine, gpu.hardware()),
        *(check(machine) for check in (gpu.driver, gpu.dtypes, gpu.peaks, gpu.kernels, gpu.attention)),
        *gpu.amd(machine, os.environ, installed_bitsandbytes=software.version_of("bitsandbytes")),
        *gpu.bad_pairs(machine, rocm=gpu.rocm_version(), triton=triton),
        gpu.communication(machine),
        *host.resources(),
        *host.environment(os.environ, machine.vendor),
    ]


def _check_kernels() -> list[Check]:
    """Compare every kernel with float64, and print one line per op and dtype."""
    with importing():
        import torch

        from ligertune.bench.kernel_check import check_ops, dtypes_to_check
        from ligertune.hardware import this_machine

    machine = this_machine()
    done = []
    with render.status("checking the kernels ...") as status:
        for rows in check_ops(torch.device(machine.device), dtypes_to_check(machine)):
            done += rows
            status.update(f"checking the kernels: {len(done)} done, last {rows[0].case.op}")
    render.text()
    render.columns("Kernels against float64", ["", "dtype", "", "relative error", "allowed"], _lines(done))
    wrong = sum(not check.good for check in done)
    verdict = f"{wrong} WRONG" if wrong else "all within their tolerance"
    render.text(f"{len(done)} checks in {sum(check.seconds for check in done):.0f} s: {verdict}")
    return done


def _lines(checks: list[Check]) -> list[list[str]]:
    """Return a table line for the worst case of each op and dtype."""
    lines = []
    for op, dtype in dict.fromkeys((check.case.op, check.case.dtype) for check in checks):
        rows = [check for check in checks if (check.case.op, check.case.dtype) == (op, dtype)]
        worst = max(rows, key=lambda check: (not check.good, check.error is None, check.error or 0.0))
        result = f"{worst.case.label}, {worst.form}: {worst.failure}" if worst.failure else f"{worst.error:.1e}"
        verdict = "ok" if worst.good else "WRONG"
        lines.append([op, str(dtype).removeprefix("torch."), verdict, result, f"{worst.bound:g}"])
    return lines
