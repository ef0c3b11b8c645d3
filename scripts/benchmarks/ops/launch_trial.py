"""Apply a candidate of scripts/launch_candidates.py for the length of a context, by patching the ops' modules."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import BoundLaunch, cached, chip_of
from ligertune_kernels.ops.attention import rope
from ligertune_kernels.ops.attention import tiles as attention_tiles
from ligertune_kernels.ops.norms import kernels as norm_kernels
from ligertune_kernels.ops.norms.tiles import NormCall

from benchmarks.ops.launch_candidates import Candidate, Direction, Norm, Patch, Turn
from ligertune.bench.case import Case

EDITED = tempfile.TemporaryDirectory(prefix="edited_kernels_")  # deleted when the process ends


def trial(case: Case, candidate: Candidate, decided: dict[str, str]) -> Callable[[], AbstractContextManager]:
    """Return a function that opens a context with the candidate's choices; `decided` receives what was launched."""
    if case.op == "apply_rope":
        (choice,) = candidate.choices or (Turn(),)
        patches = _of_rope(choice, decided)
    else:
        patches = _of_norm({choice.direction: choice for choice in candidate.choices}, decided)
    return lambda: _patched(patches)


@contextlib.contextmanager
def _patched(patches: list[Patch]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, value in patches:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _of_norm(choices: dict[Direction, Norm], decided: dict[str, str]) -> list[Patch]:
    """Plan norms through caches of their own, so that plans of candidates and of the code are kept apart."""

    def plans(direction: Direction, original: Callable) -> Callable:
        def plan(call: NormCall, *needs: tuple[bool, bool, bool]) -> norm_kernels.LaunchPlan:
            found = original(call, *needs)
            if direction in choices:
                found = _decided(found, choices[direction], chip_of(call.device))
            decided[direction] = _words(found, chip_of(call.device))
            return found

        return cached(plan)

    planned = (("forward", "_plan_forward"), ("backward", "_plan_backward"))
    patches = [(norm_kernels, name, plans(way, getattr(norm_kernels, name).__wrapped__)) for way, name in planned]
    patches.append((norm_kernels, "_plan_sums", cached(norm_kernels._plan_sums.__wrapped__)))
    return patches + [patch for choice in choices.values() for patch in choice.constants]


def _decided(plan: norm_kernels.LaunchPlan, choice: Norm, chip: Chip) -> norm_kernels.LaunchPlan:
    """Return the code's plan with the candidate's choices."""
    parts = choice.parts or plan.parts
    constants = dict(plan.launch.constants)
    if "BLOCK" in constants:
        constants["BLOCK"] = constants["BLOCK"] * plan.parts // parts
    changes = {"num_warps": choice.warps, "STAGES": choice.stages, "ROWS": choice.rows, "maxnreg": choice.registers}
    changes["PARTS"] = choice.parts
    constants |= {name: value for name, value in changes.items() if value is not None}
    kernel = plan.launch.kernel
    if choice.edits:
        kernel = getattr(_edited(norm_kernels, choice.edits), kernel.fn.__name__)
    programs = plan.programs * plan.parts if choice.programs is None else choice.programs * chip.processors
    launch = BoundLaunch(kernel, constants, plan.launch.integers)
    rows = choice.rows or plan.rows
    return plan._replace(launch=launch, rows=rows, programs=max(1, programs // parts), parts=parts)


def _words(plan: norm_kernels.LaunchPlan, chip: Chip) -> str:
    constants, programs = plan.launch.constants, plan.programs * plan.parts
    each = f"{programs / chip.processors:.3g} programs a processor" if programs < 1 << 24 else "a program a tile"
    named = [f"{constants['num_warps']} warps", f"{constants.get('STAGES', 1)} stages", each, f"{plan.parts} parts"]
    named += [f"{constants['maxnreg']} registers at most"] if "maxnreg" in constants else []
    columns = constants["BLOCK"] if "BLOCK" in constants else 2 * constants["HALF"]  # backward_halves_kernel has halves
    return f"{plan.launch.kernel.fn.__name__}, {plan.rows} rows of {columns}, {', '.join(named)}"


def _of_rope(choice: Turn, decided: dict[str, str]) -> list[Patch]:
    def tile(n_heads: int, width: int) -> tuple[int, int]:
        pairs = choice.pairs or attention_tiles.ROPE_PAIRS
        heads = min(attention_tiles.power_of_2(n_heads), choice.heads, max(1, 2 * pairs // width))
        return max(1, pairs // (heads * width)), heads

    def chosen(elements: int, chip: Chip) -> dict[str, int | bool]:
        found = launch_options(elements, chip)
        found["num_warps"] = choice.warps or found["num_warps"]
        tokens, heads = rope.rope_tile(32, 64)
        words = f"{tokens} tokens of {heads} heads, {found['num_warps']} warps"
        decided["forward"] = decided["backward"] = words
        return found

    # a separate cache, filled inside the context
    patches: list[Patch] = [(rope, "launch_options", chosen), (rope, "_launch", cached(rope._launch.__wrapped__))]
    if choice.pairs or choice.heads != 8:
        patches.append((rope, "rope_tile", tile))
    if choice.edits:
        patches.append((rope, "_rope_kernel", _edited(rope, choice.edits)._rope_kernel))
    return patches


@cached
def _edited(module: ModuleType, edits: tuple[tuple[str, str], ...]) -> ModuleType:
    """Return the module with edited source, written to a file, because Triton reads kernels from files."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    for old, text in edits:
        if old not in source:
            raise ValueError(f"{module.__name__} has no {old!r} any more")
        source = source.replace(old, text)
    folder = Path(EDITED.name)
    path = folder / f"edited_{len(list(folder.glob('*.py')))}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    return edited
