"""Reference log-probabilities on disk: in the data cache, for other runs, and in the run's folder, for a resume."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ligertune.data.cache import cache_home
from ligertune.features.model_identity import model_identity
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.features.stored_arrays import map_array
from ligertune.files.checked_files import DamagedFileError
from ligertune.files.storage import write_bytes
from ligertune.planning.plan import Plan

if TYPE_CHECKING:
    from ligertune.data.examples import Examples

FOLDER = "reference"  # in output_dir


class StoredLogProbs:
    """The log-probabilities of some examples under the initial model of a plan, in files named by two keys.

    The first contains what the numbers depend on: the model's files, how it computes, the examples, and which tokens
    count. The second contains what their rounding depends on: the batches and the kernels. All ranks call `load` and
    `save`; the main rank reads and writes.
    """

    def __init__(self, plan: Plan, examples: Examples) -> None:
        self._key = log_probs_key(plan, examples)
        self.name = f"reference-{self._key}-{rounding_key(plan)}.npy"
        # KTO has single answers, the other losses have pairs.
        self._shape = (len(examples), 1 if plan.build.section(PreferenceSpec).loss_type == "kto" else 2)
        self._places = [plan.output_dir / FOLDER / self.name, cache_home() / self.name]

    def load(self) -> np.ndarray | None:
        """Return the stored array on all ranks; None if no place has it."""
        return self._first_of(self._places)

    def load_of_other_batches(self) -> np.ndarray | None:
        """Return an array of the run's folder that was rounded in other batches, on all ranks; None without one."""
        return self._first_of(sorted(self._places[0].parent.glob(f"reference-{self._key}*.npy")))

    def _first_of(self, paths: Sequence[Path]) -> np.ndarray | None:
        """Return the first array that can be read, on all ranks."""
        found = [next(filter(None, map(self._read, paths)), None) if _is_main() else None]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        return None if found[0] is None else found[0][0]

    def save(self, values: np.ndarray) -> None:
        """Write the array wherever it is missing."""
        if not _is_main():
            return
        for path in self._places:
            if self._read(path) is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                content = io.BytesIO()
                np.save(content, values)
                write_bytes(path, content.getvalue())

    def _read(self, path: Path) -> tuple[np.ndarray] | None:
        """Return the array of a file in a tuple; None if it is missing, damaged or of another size."""
        try:
            values = np.array(map_array(path, np.float32, self._shape))
        except (OSError, DamagedFileError):
            return None
        return (values,) if np.isfinite(values).all() else None


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def log_probs_key(plan: Plan, examples: Examples) -> str:
    """Return the SHA-256 of everything that the reference log-probabilities of these examples depend on."""
    build = plan.build
    quantised = "int8" if build.method.load_in_8bit else build.method.type == "qlora"
    parts: dict[str, Any] = {
        "model": model_identity(build),
        "precision": [plan.precision.weights, plan.precision.autocast, quantised],
        "examples": examples.fingerprint,
        "ld_alpha": build.section(PreferenceSpec).ld_alpha,
        "torch": torch.__version__,
    }
    if build.method.init_from_weights:  # an adapter made from the weights, and what is left of them, are rounded
        parts["adapter"] = [build.method.init_lora_weights, build.method.lora_r, build.seed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def rounding_key(plan: Plan) -> str:
    """Return a hash of what decides the shapes and the kernels of the products, and so how their sums are rounded."""
    build = plan.build
    method = build.method
    parts: dict[str, Any] = {
        "batches": plan.batching,
        "rows": [plan.rows.kind, plan.rows.length, plan.rows.multiple_of, plan.rows.padding_free, build.seed],
        "kernels": [plan.kernels_backend, build.kernels.model_dump(), plan.attn_implementation, plan.tile],
        "compiled": build.execution.torch_compile,
        "adapter": [method.type, method.lora_r, method.lora_target_modules],
        "max_length": plan.data_options.max_length,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]
