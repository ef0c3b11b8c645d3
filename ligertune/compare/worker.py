"""The process of one trial: `python -m ligertune.compare.worker RECIPE FOLDER [CHANGE]`, once for each rank.

The report goes to FOLDER/result.json. What went wrong goes to FOLDER/failure-RANK.json, where the comparison can tell
memory that ran out from a mistake.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

from ligertune.compare.trial import RESULT, Failure
from ligertune.errors import UserError
from ligertune.hardware import is_main_process
from ligertune.storage import write_json


def main(recipe: Path, folder: Path, change: str | None = None) -> int:
    """0, or 1 with the failure written down."""
    try:
        result = _train(recipe, change)
    except (UserError, MemoryError, RuntimeError) as error:
        failure = failure_of(error)
        if failure is None:
            raise
        return _fail(folder, failure)
    if is_main_process():
        write_json(folder / RESULT, result)
    return 0


def failure_of(error: Exception) -> Failure | None:
    """What to write down; None for a mistake of ours, whose traceback is wanted."""
    import torch

    from ligertune.train.checks import OutOfDeviceMemory

    if isinstance(error, UserError):
        return Failure("out of memory" if isinstance(error, OutOfDeviceMemory) else "error", str(error))
    if isinstance(error, MemoryError):
        return Failure("out of memory", f"the host's memory: {error}")
    # what torch's CPU allocator raises has no class of its own
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return Failure("out of memory", str(error).splitlines()[0])
    return None


def _train(recipe: Path, change: str | None) -> dict:
    """The run's report as a dict, with the machine it ran on, its attention and how its rows were made."""
    from ligertune.compare.changes import CHANGES
    from ligertune.recipe import load_recipe
    from ligertune.run import plan_for, run

    job = plan_for(load_recipe(recipe))
    report = run(job, lambda line: None, change=CHANGES[change] if change else None)
    plan = job.plan
    return {
        **report.as_dict(),
        "vendor": plan.machine.vendor,
        "arch": plan.machine.arch,
        "attn_implementation": plan.attn_implementation,
        "rows": plan.rows.kind,
        "padding_free": plan.rows.padding_free,
        "fp8": plan.build.execution.fp8,
    }


def _fail(folder: Path, failure: Failure) -> int:
    write_json(folder / f"failure-{os.environ.get('RANK', '0')}.json", asdict(failure))
    sys.stderr.write(f"{failure.kind}: {failure.sentence}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
