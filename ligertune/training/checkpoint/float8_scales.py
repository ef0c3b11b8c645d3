"""Scales of float8 layers in checkpoints: a resumed run rounds as an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ligertune.errors import UserError
from ligertune.models.float8.delayed_scales import DelayedScales
from ligertune.models.float8.float8_linear import scales_of

FILE = "float8_scales.safetensors"


def save_float8_scales(accelerator: Accelerator, model: nn.Module) -> None:
    """Add the scales of the model's float8 layers to accelerate's checkpoints, and load them from there.

    A checkpoint of a run without float8 has none: its first step is scaled like the first of any run.
    """
    scales = scales_of(model)
    if scales is None:
        return

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        if accelerator.is_main_process:
            write_scales(scales, Path(folder))

    def load(models: list[nn.Module], folder: str) -> None:
        read_scales(scales, Path(folder))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def write_scales(scales: DelayedScales, folder: Path) -> None:
    """Write the scales, which ranks share, into the folder of a checkpoint."""
    save_file(scales.state(), folder / FILE)


def read_scales(scales: DelayedScales, folder: Path) -> None:
    """Load the scales of a checkpoint, if it has some. Raises UserError for those of another model."""
    path = folder / FILE
    if not path.exists():
        return
    try:
        scales.load(load_file(path))
    except ValueError as error:
        raise UserError(
            f"{path} does not fit this model: {error}.",
            hint="Resume with the recipe that the run was started with, or start a new run in another output_dir.",
        ) from error
