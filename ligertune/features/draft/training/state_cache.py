"""States of the target on disk (`draft.cache`), so that its forward runs once for each example.

FOLDER/target.json says which target the states are of. Each example has a file, named by a hash of its tokens: packed
documents do not attend to each other, and each begins at position 0, so the states of an example depend on its tokens
alone. Runs with other packs, seeds and ranks find the states of the same examples, and never read those of other data.
A file is renamed when it is complete. A damaged one counts as missing, and is written again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ligertune.errors import UserError, format_bytes, plural
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.training.draft_memory import DraftLayersShape
from ligertune.features.draft.training.draft_target import frozen_as
from ligertune.features.model_identity import files_identity, model_identity
from ligertune.features.task import examples_in_memory
from ligertune.files.storage import read_object, write_bytes, write_json, writing
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.plan import Plan

if TYPE_CHECKING:
    from ligertune.data.examples import Example
    from ligertune.data.prepare import PreparedData

KEY = "draft.cache"
TARGET = "target.json"
FIELDS = ("target_states", "last_states")  # of a batch: (N, 3E) and (N, E)
KEEP_STATES = "keep_states"  # of a batch without them: a function of both


@dataclass(frozen=True)
class StateCache:
    """A folder with states of one target. target: everything that they depend on but the tokens."""

    folder: Path
    target: dict[str, Any]

    @staticmethod
    def of(plan: Plan, layer_ids: Sequence[int]) -> StateCache | None:
        """Return the cache of a plan, for a head that reads these layers; None without `draft.cache`."""
        spec = plan.build.section(DraftSpec)
        if spec.cache is None:
            return None
        adapter = None if spec.adapter_path is None else files_identity(Path(spec.adapter_path).expanduser())
        parts = [model_identity(plan.build), adapter, frozen_as(plan.build)]
        identity = json.dumps(parts, sort_keys=True, default=str)
        target = {
            "model": plan.build.model.model_name_or_path,
            "weights": hashlib.sha256(identity.encode()).hexdigest()[:32],
            "layer_ids": list(layer_ids),
            "dtype": plan.precision.weights,
            "autocast": plan.precision.autocast,
        }
        return StateCache(Path(spec.cache), target)

    def check(self) -> None:
        """Raise UserError if the folder holds states of another target, or something else."""
        found = read_object(self.folder / TARGET)
        if found == self.target:
            return
        if found is None:
            visible = self.folder.is_dir() and any(self.folder.glob("[!.]*"))
            if visible or (self.folder.exists() and not self.folder.is_dir()):
                raise UserError(
                    f"{KEY}: {self.folder} is no folder of states: it lacks a readable {TARGET}.",
                    hint="Name a new folder.",
                )
            return
        differing = [name for name, value in self.target.items() if found.get(name) != value]
        raise UserError(
            f"{KEY}: {self.folder} holds the states of another target: {', '.join(differing)} in its {TARGET} "
            f"{'differs' if len(differing) == 1 else 'differ'} from this run's.",
            hint="Name another folder, or delete this one.",
        )

    def open(self) -> None:
        """Write target.json if the folder is new. All ranks may call it. Raises UserError as `check` does."""
        self.check()
        if not (self.folder / TARGET).exists():
            with writing(f"{KEY}: {self.folder}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(self.folder / TARGET, self.target)

    def path_of(self, example: Example) -> Path:
        """Return the file of an example."""
        key = hashlib.sha256(example.input_ids.astype("<i8").tobytes()).hexdigest()[:40]
        return self.folder / key[:2] / f"{key}.safetensors"

    def batch_fields(self, examples: Sequence[Example], batch: dict[str, Any]) -> dict[str, Any]:
        """Return FIELDS of a batch of these examples; if a file is missing, KEEP_STATES, which writes those that are.

        Rows of padding have zeros, which no row reads.
        """
        placed = list(zip(examples, _first_rows(examples, batch), strict=True))
        found = [self._read(example) for example in examples]
        if not all(found):
            missing = [place for place, tensors in zip(placed, found, strict=True) if not tensors]
            return {KEEP_STATES: partial(self.write, missing)}
        fields = {}
        for name in FIELDS:
            width = found[0][name].shape[1]
            fields[name] = found[0][name].new_zeros(batch["input_ids"].numel(), width)
            for (example, start), tensors in zip(placed, found, strict=True):
                fields[name][start : start + len(example.input_ids)] = tensors[name]
        return fields

    def write(self, examples: Sequence[tuple[Example, int]], *states: Tensor) -> None:
        """Write the files of examples that begin at these rows of a batch with `states`, FIELDS in order."""
        on_host = dict(zip(FIELDS, (one.detach().cpu() for one in states), strict=True))
        with writing(f"{KEY}: {self.folder}"):
            for example, start in examples:
                rows = slice(start, start + len(example.input_ids))
                path = self.path_of(example)
                path.parent.mkdir(exist_ok=True)
                write_bytes(path, save({name: one[rows].contiguous() for name, one in on_host.items()}))

    def _read(self, example: Example) -> dict[str, Tensor]:
        """Return FIELDS of an example; empty if its file is missing or damaged."""
        try:
            found = load(self.path_of(example).read_bytes())
        except (OSError, SafetensorError):
            return {}
        is_whole = set(found) == {*FIELDS} and all(len(one) == len(example.input_ids) for one in found.values())
        return found if is_whole else {}


def _first_rows(examples: Sequence[Example], batch: dict[str, Any]) -> list[int]:
    """Return the row of B · T at which each example of a batch begins."""
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    if "document_lengths" not in batch:  # one example a row
        return [row * batch["input_ids"].shape[1] for row in range(len(examples))]
    return (lengths.cumsum(0) - lengths).tolist()


def check_cache(plan: Plan, shape: ModelShape, data: PreparedData) -> tuple[str, ...]:
    """Return a note on the size of `draft.cache`, if there is one. Raises UserError if it cannot be used."""
    spec = plan.build.section(DraftSpec)
    if spec.cache is None:
        return ()
    if plan.shares_weights:
        raise UserError(
            f"{KEY} lets each process run the target for its own batches, and {plan.strategy} needs all at once.",
            hint=f"Write parallel.strategy: ddp, or leave {KEY} out.",
        )
    examples = [*examples_in_memory(data.train), *(data.eval or ())]
    if any(example.media for example in examples):
        raise UserError(f"{KEY} keeps the states of texts, and these examples have images.", hint=f"Leave {KEY} out.")
    heads = shape.heads
    assert isinstance(heads, DraftLayersShape)  # of every model with a head: see `DraftShape.of_model`
    cache = StateCache.of(plan, heads.draft.layer_ids)
    assert cache is not None  # there is a folder
    cache.check()
    width = (len(heads.draft.layer_ids) + 1) * heads.draft.hidden_size
    token_bytes = width * (4 if plan.precision.weights == "float32" else 2)
    sizes = {cache.path_of(example): token_bytes * len(example.input_ids) for example in examples}
    return (space_note(cache.folder, sizes, spec.cache_max_gib),)


def space_note(folder: Path, sizes: Mapping[Path, int], max_gib: float) -> str:
    """Return a note on the sizes of files. Raises UserError if their sum exceeds max_gib or what the disk has free."""
    needed = sum(sizes.values())
    present = sum(size for path, size in sizes.items() if path.exists())
    what = f"the target's states of {plural(len(sizes), 'example')} take {format_bytes(needed)}"
    if needed > max_gib * 2**30:
        raise UserError(
            f"{KEY}: {what}, and draft.cache_max_gib is {max_gib:g}.",
            hint=f"Write a larger draft.cache_max_gib, take less data, or leave {KEY} out.",
        )
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed - present > free:
        raise UserError(
            f"{KEY}: {what}, of which {format_bytes(present)} are there, and {existing} has {format_bytes(free)} free.",
            hint="Name a folder on a larger disk, or take less data.",
        )
    return f"{KEY}: {what} in {folder}, of which {format_bytes(present)} are there"
