"""Log-probabilities of a teacher on disk: the K most probable tokens at each trained token, written once.

A folder holds teacher.json and, for training and for evaluation examples, two arrays (trained tokens, K): token ids and
log-probabilities, of the examples in their order. teacher.json is written last, so a folder with it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ligertune.data.batching.collate import Batcher
from ligertune.errors import UserError
from ligertune.patching.deferred_logits import next_tokens
from ligertune.tasks.distill.divergence import CHUNK_ROWS, IGNORE_INDEX
from ligertune.tasks.distill.teacher import load_teacher

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.prepare import PreparedData
    from ligertune.planning.options import DistillOptions
    from ligertune.planning.plan import Plan

DESCRIPTION = "teacher.json"
BATCH_TOKENS = 8192  # of a forward, at least one example
KEY = "distill.teacher_file"


@dataclass(frozen=True)
class TeacherFile:
    """What a folder holds. Fingerprints are those of the examples; None without evaluation examples."""

    teacher: str
    revision: str
    temperature: float
    top_k: int
    vocab_size: int
    train: str
    eval: str | None

    @staticmethod
    def read(folder: Path) -> TeacherFile:
        """Read teacher.json. Raises UserError if it is missing or damaged."""
        path = folder / DESCRIPTION
        try:
            return TeacherFile(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as problem:
            raise UserError(
                f"{KEY}: {folder} holds no complete log-probabilities of a teacher ({DESCRIPTION}).",
                hint="Name the folder that `ligertune distill RECIPE --write FOLDER` wrote.",
            ) from problem

    def check(self, folder: Path, options: DistillOptions, data: PreparedData, vocab_size: int) -> None:
        """Raise UserError unless the file fits the recipe, its data and the student's vocabulary."""
        evaluation = data.eval.fingerprint if data.eval else None
        problems = (
            (options.teacher not in (None, self.teacher), f"its teacher is {self.teacher}",
             "Leave distill.teacher out, or name that one."),
            (options.temperature != self.temperature, f"it was written with distill.temperature: {self.temperature}",
             "Write that."),
            (self.vocab_size > vocab_size, f"its vocabulary has {self.vocab_size} tokens, the model's {vocab_size}",
             "Write it with this model."),
            ((self.train, self.eval) != (data.train.fingerprint, evaluation),
             "it was written for other data, another tokenizer or another seed", "Write it again for this recipe."),
        )  # fmt: skip
        for is_wrong, what, hint in problems:
            if is_wrong:
                raise UserError(f"{KEY}: {folder} does not fit: {what}.", hint=hint)


def teacher_file_notes(options: DistillOptions, data: PreparedData, vocab_size: int) -> tuple[str, ...]:
    """Return a note about distill.teacher_file, if there is one. Raises UserError if it does not fit."""
    if options.teacher_file is None:
        return ()
    folder = Path(options.teacher_file)
    found = TeacherFile.read(folder)
    found.check(folder, options, data, vocab_size)
    return (
        f"distill: the {found.top_k} largest log-probabilities of {found.teacher} are read from {folder}, and the "
        f"teacher is not loaded; no kernel computes this loss, the logits of {CHUNK_ROWS:,} tokens are made at a time",
    )


class StoredTeacher:
    """The stored log-probabilities of some examples, memory-mapped."""

    def __init__(self, folder: Path, name: str, examples: Examples) -> None:
        self._ids, self._log_probs = (np.load(folder / f"{name}_{part}.npy", mmap_mode="r") for part in ARRAYS)
        self._ends = np.cumsum(examples.trained, dtype=np.int64)
        if not len(self._ids) == len(self._log_probs) == (self._ends[-1] if len(self._ends) else 0):
            raise UserError(
                f"{KEY}: {folder} is damaged: its {name} arrays have another length.", hint="Write it again."
            )
        self._trained = examples.trained

    def of(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return token ids and log-probabilities (M, K) of the trained tokens of some examples, in order."""
        rows = np.concatenate([np.arange(self._ends[i] - self._trained[i], self._ends[i]) for i in indices])
        return torch.from_numpy(self._ids[rows].astype(np.int64)), torch.from_numpy(self._log_probs[rows])


ARRAYS = ("ids", "log_probs")


@torch.no_grad()
def write_teacher_file(
    plan: Plan, data: PreparedData, folder: Path, *, pad_token_id: int, vocab_size: int, show: Callable[[str], None]
) -> TeacherFile:
    """Run the teacher over all examples and write its log-probabilities. vocab_size: the student's."""
    options, device = plan.build.distill, torch.device(plan.machine.device)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"--write: {folder} is not empty.", hint="Name a new folder.")
    teacher = load_teacher(plan, device)
    size = min(vocab_size, len(teacher.head.weight))
    top_k = min(options.top_k, size)
    for name, examples in (("train", data.train), ("eval", data.eval)):
        if not examples:
            continue
        count, begins = int(examples.trained.sum()), np.cumsum(examples.trained, dtype=np.int64) - examples.trained
        arrays = [
            np.lib.format.open_memmap(folder / f"{name}_{part}.npy", mode="w+", dtype=dtype, shape=(count, top_k))
            for part, dtype in zip(ARRAYS, (np.int32, np.float32), strict=True)
        ]
        batcher = Batcher(
            examples,
            packed=plan.rows.is_padding_free,
            multiple_of=plan.rows.multiple_of,
            pad_token_id=pad_token_id,
            index_labels=False,
            device=device,
        )
        for indices in _batches(examples.lengths):
            batch = batcher([np.array([index]) for index in indices])
            predicts = next_tokens(batch["labels"], IGNORE_INDEX).flatten() != IGNORE_INDEX
            hidden = teacher.hidden_states(batch)[predicts]
            places = np.concatenate([np.arange(begins[i], begins[i] + examples.trained[i]) for i in indices])
            for start in range(0, len(places), CHUNK_ROWS):
                rows = slice(start, start + CHUNK_ROWS)
                logits = teacher.head.logits(hidden[rows], size) / options.temperature
                log_probs, ids = logits.log_softmax(-1).topk(top_k)
                arrays[0][places[rows]], arrays[1][places[rows]] = ids.cpu().numpy(), log_probs.float().cpu().numpy()
        for array in arrays:
            array.flush()
        show(f"{name}: {count:,} tokens of {len(examples):,} examples, {top_k} log-probabilities each")
    evaluation = data.eval.fingerprint if data.eval else None
    name, revision = str(options.teacher), options.teacher_revision
    found = TeacherFile(name, revision, options.temperature, top_k, size, data.train.fingerprint, evaluation)
    (folder / DESCRIPTION).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return found


def _batches(lengths: np.ndarray) -> list[list[int]]:
    """Return example indices, longest first, in batches of at most BATCH_TOKENS slots."""
    batches: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= BATCH_TOKENS:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
