"""Log-probabilities of a teacher on disk: the K most probable tokens at each trained token, written once.

A folder holds teacher.json and, for training and for evaluation examples, two arrays (trained tokens, K): token ids and
log-probabilities, of the examples in their order. teacher.json is written last, so a folder with it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ligertune.data.batching.collate import Batcher
from ligertune.errors import UserError, format_bytes
from ligertune.features.distill.divergence import CHUNK_ROWS, IGNORE_INDEX
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.distill.teacher import Teacher, load_teacher
from ligertune.features.stored_arrays import CHECKED_ROWS, RowWriter, map_array
from ligertune.features.task import examples_in_memory
from ligertune.files.checked_files import DamagedFileError, read_fields
from ligertune.files.storage import new_folder, write_text, writing
from ligertune.hardware import is_main_process
from ligertune.patching.deferred_logits import next_tokens

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.prepare import PreparedData
    from ligertune.planning.plan import Plan

DESCRIPTION = "teacher.json"
STORED: dict[str, type[np.int32] | type[np.float32]] = {"ids": np.int32, "log_probs": np.float32}
WriteRows = Callable[[np.ndarray, np.ndarray], None]  # places, rows
BATCH_TOKENS = 8192  # of a forward, at least one example
MAX_VOCABULARY = 2**24  # as in the sizes of a configuration
# The sum of probabilities rounded to float32 and summed over 100,000 tokens stays far closer to 1.
MAX_SUM = 1.001
KEY = "distill.teacher_file"
WRITE_AGAIN = "Write it again: ligertune distill RECIPE --write FOLDER."


@dataclass(frozen=True)
class TeacherFile:
    """What a folder holds. Fingerprints are those of the examples; None without evaluation examples."""

    teacher: str
    revision: str
    temperature: float = field(metadata={"range": (1e-9, 1e9)})
    top_k: int = field(metadata={"range": (1, MAX_VOCABULARY)})
    vocab_size: int = field(metadata={"range": (1, MAX_VOCABULARY)})
    train: str
    eval: str | None

    @staticmethod
    def read(folder: Path) -> TeacherFile:
        """Read teacher.json. Raises UserError if it is missing or damaged."""
        path = folder / DESCRIPTION
        try:
            found = read_fields(TeacherFile, path)
        except OSError as problem:
            raise UserError(
                f"{KEY}: {folder} holds no complete log-probabilities of a teacher: {DESCRIPTION}: {problem.strerror}.",
                hint="Name the folder that `ligertune distill RECIPE --write FOLDER` wrote.",
            ) from problem
        except DamagedFileError as problem:
            raise UserError(f"{KEY}: {path} {problem}.", hint=WRITE_AGAIN) from problem
        if found.top_k > found.vocab_size:
            raise UserError(
                f"{KEY}: {path} names {found.top_k} tokens of a vocabulary of {found.vocab_size}.", hint=WRITE_AGAIN
            )
        return found

    def check(self, folder: Path, options: DistillSpec, data: PreparedData, vocab_size: int) -> None:
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


def teacher_file_notes(options: DistillSpec, data: PreparedData, vocab_size: int) -> tuple[str, ...]:
    """Return a note about distill.teacher_file, if there is one. Raises UserError if it does not fit."""
    if options.teacher_file is None:
        return ()
    folder = Path(options.teacher_file)
    found = TeacherFile.read(folder)
    found.check(folder, options, data, vocab_size)
    for name, examples in (("train", examples_in_memory(data.train)), ("eval", data.eval)):
        # The other ranks of a launcher would read the same files, and end with this one.
        if examples and is_main_process():
            StoredTeacher(folder, name, examples).check_values(found.vocab_size)
    return (
        f"distill: the {found.top_k} largest log-probabilities of {found.teacher} are read from {folder}, and the "
        f"teacher is not loaded; no kernel computes this loss, the logits of {CHUNK_ROWS:,} tokens are made at a time",
    )


class StoredTeacher:
    """The stored log-probabilities of some examples, memory-mapped."""

    def __init__(self, folder: Path, name: str, examples: Examples) -> None:
        self._trained = examples.trained
        self._ends = np.cumsum(examples.trained, dtype=np.int64)
        shape = (int(examples.trained.sum()), TeacherFile.read(folder).top_k)
        self._paths = [folder / f"{name}_{part}.npy" for part in STORED]
        with explain_damage(self._paths[0]):
            self._ids = map_array(self._paths[0], np.int32, shape)
        with explain_damage(self._paths[1]):
            self._log_probs = map_array(self._paths[1], np.float32, shape)

    def check_values(self, vocab_size: int) -> None:
        """Read all values. Raises UserError for ids that are none, and for what is no distribution."""
        for start in range(0, len(self._ids), CHECKED_ROWS):
            ids, log_probs = (array[start : start + CHECKED_ROWS] for array in (self._ids, self._log_probs))
            with explain_damage(self._paths[0]):
                if ids.min() < 0 or ids.max() >= vocab_size:
                    raise DamagedFileError(f"holds token ids that are not in its vocabulary of {vocab_size}")
                ordered = np.sort(ids, axis=1)
                if (ordered[:, 1:] == ordered[:, :-1]).any():
                    raise DamagedFileError("holds a token twice for one position")
            with explain_damage(self._paths[1]):
                if not np.isfinite(log_probs).all():
                    raise DamagedFileError("holds log-probabilities that are not finite")
                if log_probs.max() > np.log(MAX_SUM) or np.exp(log_probs).sum(1).max() > MAX_SUM:
                    raise DamagedFileError("holds probabilities whose sum is more than 1")

    def of(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return token ids and log-probabilities (M, K) of the trained tokens of some examples, in order."""
        rows = np.concatenate([np.arange(self._ends[i] - self._trained[i], self._ends[i]) for i in indices])
        return torch.from_numpy(self._ids[rows].astype(np.int64)), torch.from_numpy(self._log_probs[rows])


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Raise UserError for a damaged or missing file of a teacher."""
    try:
        yield
    except OSError as problem:
        raise UserError(f"{KEY}: {path} cannot be read: {problem.strerror}.", hint=WRITE_AGAIN) from problem
    except DamagedFileError as problem:
        raise UserError(f"{KEY}: {path} {problem}.", hint=WRITE_AGAIN) from problem


def check_space_for(folder: Path, plan: Plan, data: PreparedData, vocab_size: int) -> None:
    """Raise UserError if the disk of `folder` has no space for the arrays, or if their size is not known.

    vocab_size: the student's.
    """
    if data.streamed:
        raise UserError("--write: data.streaming does not know its tokens before.", hint="Write data.streaming: false.")
    tokens = int(examples_in_memory(data.train).trained.sum()) + (int(data.eval.trained.sum()) if data.eval else 0)
    row_bytes = min(plan.build.section(DistillSpec).top_k, vocab_size) * sum(
        np.dtype(dtype).itemsize for dtype in STORED.values()
    )
    needed = tokens * row_bytes
    existing = next(path for path in folder.absolute().parents if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"--write: {existing} has {format_bytes(free)} free, and the log-probabilities of {tokens:,} tokens need "
            f"{format_bytes(needed)}.",
            hint="Lower distill.top_k, or name a folder on a larger disk.",
        )


@writing("The log-probabilities", trains=False)
@torch.no_grad()
def write_teacher_file(
    plan: Plan, data: PreparedData, folder: Path, *, pad_token_id: int, vocab_size: int, show: Callable[[str], None]
) -> TeacherFile:
    """Run the teacher over all examples and write its log-probabilities. vocab_size: the student's."""
    options = plan.build.section(DistillSpec)
    device = torch.device(plan.machine.device)
    check_space_for(folder, plan, data, vocab_size)
    teacher = load_teacher(plan, device)
    size = min(vocab_size, len(teacher.head.weight))
    top_k = min(options.top_k, size)
    with new_folder(folder) as partial:
        for name, examples in (("train", examples_in_memory(data.train)), ("eval", data.eval)):
            if not examples:
                continue
            batcher = Batcher(
                examples,
                packed=plan.rows.is_padding_free,
                multiple_of=plan.rows.multiple_of,
                pad_token_id=pad_token_id,
                index_labels=False,
                device=device,
            )
            count = int(examples.trained.sum())
            with _writers(partial, name, count, top_k) as (write_ids, write_log_probs):
                for places, logits in _logits(teacher, batcher, size):
                    log_probs, ids = (logits / options.temperature).log_softmax(-1).topk(top_k)
                    write_ids(places, ids.cpu().numpy())
                    write_log_probs(places, log_probs.float().cpu().numpy())
            show(f"{name}: {count:,} tokens of {len(examples):,} examples, {top_k} log-probabilities each")
        evaluation = data.eval.fingerprint if data.eval else None
        found = TeacherFile(
            teacher=str(options.teacher),
            revision=options.teacher_revision,
            temperature=options.temperature,
            top_k=top_k,
            vocab_size=size,
            train=data.train.fingerprint,
            eval=evaluation,
        )
        write_text(partial / DESCRIPTION, json.dumps(asdict(found), indent=1) + "\n")
    return found


@contextmanager
def _writers(folder: Path, name: str, count: int, top_k: int) -> Iterator[list[WriteRows]]:
    """Yield `RowWriter.write` of the files of ids and of log-probabilities."""
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{name}_{part}.npy").open("xb")) for part in STORED]
        yield [RowWriter(file, dtype, count, top_k).write for file, dtype in zip(files, STORED.values(), strict=True)]


def _logits(teacher: Teacher, batcher: Batcher, size: int) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield (places, logits (M, size)) of all trained tokens, at most CHUNK_ROWS at a time, longest examples first."""
    examples = examples_in_memory(batcher.examples)
    trained = examples.trained
    begins = np.cumsum(trained, dtype=np.int64) - trained
    for indices in _batches(examples.lengths):
        batch = batcher([np.array([index]) for index in indices])
        predicts = next_tokens(batch["labels"], IGNORE_INDEX).flatten() != IGNORE_INDEX
        hidden = teacher.hidden_states(batch)[predicts]
        places = np.concatenate([np.arange(begins[i], begins[i] + trained[i]) for i in indices])
        for start in range(0, len(places), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            yield places[rows], teacher.head.logits(hidden[rows], size)


def _batches(lengths: np.ndarray) -> list[list[int]]:
    """Return example indices, longest first, in batches of at most BATCH_TOKENS slots."""
    batches: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= BATCH_TOKENS:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
