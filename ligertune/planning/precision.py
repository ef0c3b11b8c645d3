"""Precision of a run: dtype of the weights, autocast, and float8 matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.recipe.schema import Recipe

OLDEST_NVIDIA = 89  # compute capability 8.9 (Ada) is the first with float8; 9.0 is Hopper
AMD_WITH_FLOAT8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")  # architectures that torch._scaled_mm supports
OTHER_FLOAT8 = ("gfx942",)  # they have e4m3fnuz, up to 240, where gfx950, gfx12 and our kernels have e4m3fn, up to 448


Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Precision:
    """The dtype of the weights, and the autocast that accelerate adds.

    "fp16" also scales the loss. "bf16" is for adapters: their weights are float32, and they compute in bfloat16.
    """

    weights: Dtype
    autocast: Literal["no", "fp16", "bf16"]

    @property
    def half(self) -> bool:
        """Whether attention and matrix products are computed in bfloat16 or float16."""
        return self.weights != "float32" or self.autocast != "no"


def choose_precision(dtype: Dtype | Literal["auto"], machine: Machine, *, method: str = "full") -> Precision:
    """Resolve `model.dtype` for a device and a method. Raises UserError if the device does not support the dtype."""
    if dtype == "auto":
        dtype = _fastest_dtype(machine)
    if dtype == "bfloat16" and not machine.has_bfloat16:
        raise UserError(
            f"model.dtype: bfloat16 is not supported by {machine.name} ({machine.arch}).",
            hint="Write model.dtype: float16 (mixed precision with a scaled loss) or float32.",
        )
    if dtype == "float16" and machine.vendor == "cpu":
        raise UserError(
            "model.dtype: float16 trains on a GPU only, and this machine has none.",
            hint="Write model.dtype: float32 or bfloat16.",
        )
    if dtype == "float16":
        return Precision(weights="float32", autocast="fp16")
    adapted = dtype == "bfloat16" and method in ("lora", "qlora")
    return Precision(weights=dtype, autocast="bf16" if adapted else "no")


def _fastest_dtype(machine: Machine) -> Dtype:
    if machine.vendor == "cpu":
        return "float32"
    return "bfloat16" if machine.has_bfloat16 else "float16"


def check_float8(recipe: Recipe, machine: Machine) -> None:
    """Raise UserError if the recipe sets `train.fp8` and the GPU has no float8 matrix products."""
    if not recipe.train.fp8 or machine.vendor == "cpu":
        return
    if machine.vendor == "amd":
        missing = machine.arch not in AMD_WITH_FLOAT8
        supported = f"AMD GPUs with it are {', '.join(AMD_WITH_FLOAT8)}"
    else:  # `plan` may be for an unknown GPU, whose arch does not start with sm
        missing = machine.arch.startswith("sm") and int(machine.arch[2:]) < OLDEST_NVIDIA
        supported = f"NVIDIA GPUs have it from sm{OLDEST_NVIDIA} on (RTX 40, L40S, H100)"
    if missing:
        raise UserError(
            f"train.fp8: {machine.name} ({machine.arch}) does not multiply in float8; {supported}.",
            hint="Write train.fp8: false.",
        )
    if machine.arch in OTHER_FLOAT8 and recipe.train.fp8 != "torchao":
        raise UserError(
            f"train.fp8: true: our kernels do not write the float8 of {machine.name} ({machine.arch}), e4m3fnuz.",
            hint="Write train.fp8: torchao.",
        )


def float8_notes(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    """Return a note if `train.fp8` does not make training faster here."""
    if not recipe.train.fp8:
        return ()
    if machine.vendor == "cpu":
        return ("train.fp8 is emulated on a CPU: the losses are those of float8, the speed is not",)
    if recipe.train.fp8 == "torchao" and not recipe.train.torch_compile:
        return ("train.fp8: torchao is slow without train.torch_compile: true: each cast launches several kernels",)
    return ()
