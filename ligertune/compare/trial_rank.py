"""One rank of a trial: `python -m ligertune.compare.trial_rank RECIPE FOLDER [CHANGE]`.

It writes the report to FOLDER/result.json, or a failure to FOLDER/failure-RANK.json. Without arguments it prints device
and versions as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.compare.trial import RESULT, Failure
from ligertune.errors import UserError, message_of, printable
from ligertune.files.storage import write_json
from ligertune.hardware import is_main_process, world_size
from ligertune.launcher.signals import handle_by_leaving
from ligertune.progress import importing
from ligertune.recipe.read import load_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _describe() -> dict[str, str]:
    import torch

    from ligertune.hardware import this_machine
    from ligertune.report import versions

    machine = this_machine()
    runtime = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    named = {name: version for name, version in runtime.items() if version and machine.vendor != "cpu"}
    return {"vendor": machine.vendor, "name": machine.name, "arch": machine.arch, **named, **versions()}


def change_model(name: str, model: PreTrainedModel) -> None:
    """Apply `Side.change` to a model that is built, before the optimizer is."""
    if name == "compile":  # for batches of any length, as train.torch_compile does with our kernels
        from ligertune.models.compile import compile_layers

        compile_layers(model, dynamic=None)
    elif name == "hf-chunked":
        from ligertune.patching.fused_loss import chunk_loss

        chunk_loss(model)
    else:
        # liger-kernel's own function for a model that is already loaded; it has no public name
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)


def run_rank(recipe: Path, folder: Path, change: str | None = None) -> int:
    """Train and write the result. Returns 0, or 1 after writing a failure; other exceptions are raised."""
    try:
        result = _train(recipe, change)
    except (UserError, MemoryError, RuntimeError) as error:
        failure = failure_of(error)
        if failure is None:
            raise
        write_json(folder / f"failure-{os.environ.get('RANK', '0')}.json", asdict(failure))
        sys.stderr.write(printable(f"{failure}\n"))
        return 1
    if is_main_process():
        write_json(folder / RESULT, result)
    return 0


def failure_of(error: Exception) -> Failure | None:
    """Return the failure to report; None for an unexpected error, whose traceback the log must show."""
    import torch

    from ligertune.training.checks import OutOfDeviceMemory

    if isinstance(error, UserError):
        return Failure("out of memory" if isinstance(error, OutOfDeviceMemory) else "error", str(error))
    if isinstance(error, MemoryError):
        return Failure("out of memory", f"host memory: {error}")
    # torch's CPU allocator raises a plain RuntimeError
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return Failure("out of memory", message_of(error))
    return None


def _train(recipe: Path, change: str | None) -> dict[str, Any]:
    """Train, and return the report with facts of the plan that a comparison shows."""
    with importing():
        from ligertune.planning.time.open_settings import with_usual_values
        from ligertune.report import batch_words
        from ligertune.run import run
        from ligertune.training.resolve import plan_for

    loaded = load_recipe(recipe)
    # all sides train with the same settings: a plan would choose others for each
    job = plan_for(with_usual_values(loaded, max(1, world_size() // loaded.parallel.cp_size)))
    report = run(job, lambda line: None, change=partial(change_model, change) if change else None)
    plan = job.plan
    return {
        **report.as_dict(),
        "vendor": plan.machine.vendor,
        "arch": plan.machine.arch,
        "attn_implementation": plan.attn_implementation,
        "rows": plan.rows.kind,
        "padding_free": plan.rows.padding_free,
        "fp8": bool(plan.build.execution.fp8),
        "batch": batch_words(plan),
    }


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.stdout.write(json.dumps(_describe()) + "\n")
    else:
        handle_by_leaving()
        sys.exit(run_rank(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
