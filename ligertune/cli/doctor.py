"""`ligertune doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from ligertune.cli import render


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False) -> None:
    """Say what this machine can do: device, dtypes, versions, whether the kernels run on Triton.

    Example: ligertune doctor
    """
    from ligertune.doctor import examine

    render.people_on_stderr(json)
    findings = examine()
    render.table("This machine", [(f.what, f.value) for f in findings])
    for finding in findings:
        if finding.advice:
            render.text(f"  warning: {finding.advice}")
    if json:
        render.json_report({f.what: {"value": f.value, "advice": f.advice} for f in findings})
