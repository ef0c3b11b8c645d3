"""Process of one trial: `python -m ligertune.compare.worker RECIPE FOLDER [CHANGE]`, started once per rank.

It writes the report to FOLDER/result.json, or a failure to FOLDER/failure-RANK.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.compare.trial import RESULT, Failure
from ligertune.errors import UserError
from ligertune.hardware import is_main_process
from ligertune.progress import importing
from ligertune.storage import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile the layers for batches of any length, as train.torch_compile does with our kernels."""
    from ligertune.models.compile import compile_layers

    compile_layers(model, dynamic=None)


def _chunk_loss(model: PreTrainedModel) -> None:
    """Compute the logits and the loss in chunks of rows, in plain PyTorch."""
    from ligertune.patching.fused_loss import chunk_loss

    chunk_loss(model)


def _apply_liger(model: PreTrainedModel) -> None:
    """Apply the kernels that liger-kernel chooses for this model."""
    # liger-kernel's own function for a model that is already loaded; it has no public name
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


# Changes of the model, made after it is built and before the optimizer.
CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {
    "compile": _compile_layers,
    "hf-chunked": _chunk_loss,
    "liger": _apply_liger,
}


def main(recipe: Path, folder: Path, change: str | None = None) -> int:
    """Train and write the result. Returns 0, or 1 after writing a failure; other exceptions are raised."""
    try:
        result = _train(recipe, change)
    except (UserError, MemoryError, RuntimeError) as error:
        failure = failure_of(error)
        if failure is None:
            raise
        write_json(folder / f"failure-{os.environ.get('RANK', '0')}.json", asdict(failure))
        sys.stderr.write(f"{failure}\n")
        return 1
    if is_main_process():
        write_json(folder / RESULT, result)
    return 0


def failure_of(error: Exception) -> Failure | None:
    """Return the failure to report; None for an unexpected error, whose traceback the log must show."""
    import torch

    from ligertune.train.checks import OutOfDeviceMemory

    if isinstance(error, UserError):
        return Failure("out of memory" if isinstance(error, OutOfDeviceMemory) else "error", str(error))
    if isinstance(error, MemoryError):
        return Failure("out of memory", f"host memory: {error}")
    # torch's CPU allocator raises a plain RuntimeError
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return Failure("out of memory", str(error).splitlines()[0])
    return None


def _train(recipe: Path, change: str | None) -> dict:
    """Train, and return the report with facts of the plan that a comparison shows."""
    from ligertune.recipe import load_recipe

    with importing():
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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
