"""Products in float8: which machines have them, and what their user should know before the run."""

from __future__ import annotations

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.recipe import Recipe

OLDEST_NVIDIA = 89  # compute capability 8.9: Ada; 9.0 is Hopper
AMD = ("gfx942", "gfx950", "gfx1200", "gfx1201")  # of which torch's scaled product knows


def check_float8(recipe: Recipe, machine: Machine) -> None:
    """A UserError where the recipe asks for float8 and the GPU has no products of it."""
    if not recipe.train.fp8 or machine.vendor == "cpu":
        return
    if machine.vendor == "amd":
        missing, has = machine.arch not in AMD, f"AMD GPUs with it are {', '.join(AMD)}"
    else:  # a plan may be for a GPU of which nothing is known
        missing = machine.arch.startswith("sm") and int(machine.arch[2:]) < OLDEST_NVIDIA
        has = f"NVIDIA GPUs have it from sm{OLDEST_NVIDIA} on (RTX 40, L40S, H100)"
    if missing:
        raise UserError(
            f"train.fp8: {machine.name} ({machine.arch}) does not multiply in float8; {has}.",
            hint="Write train.fp8: false.",
        )


def float8_notes(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    """Where float8 is not what it is asked for: speed."""
    if not recipe.train.fp8:
        return ()
    if machine.vendor == "cpu":
        return ("train.fp8 is emulated on a CPU: losses are those of float8, and speed says nothing",)
    if not recipe.train.torch_compile:
        return (
            "train.fp8 is meant for compiled layers: without train.torch_compile: true each cast to float8 is several "
            "kernels",
        )
    return ()
