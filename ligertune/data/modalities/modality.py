"""Modality: what other code may ask about a model that reads more than text, and about the files that it reads.

Each folder next to this file is a modality: its `spec.py` holds a subclass of `Modality` named MODALITY, and its
`recipe.py` its recipe section and rules. Other code calls `modality_of(config)` and names no modality.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin
from ligertune.planning.memory.model_shape import ModalityFacts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.data.rows.conversation import Conversation
    from ligertune.data.templates.control_tokens import Rendered
    from ligertune.data.templates.label_masking import Encoded
    from ligertune.planning.memory.model_shape import TowerShape
    from ligertune.planning.options import ModelOptions
    from ligertune.recipe.feature import TaskOptions

FileInputs = dict[str, "Tensor"]  # the model inputs of one file


class RowFile(Protocol):
    """A checked file of a row."""

    @property
    def path(self) -> str: ...


class RowFiles(Protocol):
    """Files of one data set's rows: find them, and put their tokens into rendered and tokenized texts."""

    cut_reason: str  # key of DROP_REASONS: the row would be cut through a file

    def extract(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return (the row as text with marks, the references that the marks number). Raises BadRow."""

    def find(self, conversation: Conversation, references: Sequence[Any], source: str) -> Sequence[RowFile]:
        """Return the files of the conversation in its order. Raises BadRow if one is missing or broken."""

    def insert(self, rendered: Rendered, files: Sequence[Any]) -> Rendered:
        """Replace each mark by the text that the model's family writes for a file. Raises BadRow.

        files: as `find` returned them.
        """

    def expand(self, encoded: Encoded, files: Sequence[Any]) -> Encoded:
        """Repeat the token of each file to its number of tokens, without labels. Raises BadRow.

        files: as `find` returned them.
        """


class ModalityReader(Protocol):
    """Settings by which the files of rows become tokens and model inputs.

    It holds no weights, so data workers can have a copy.
    """

    part_type: str  # type of the content parts that chat templates read for a file
    model_kind: str  # for messages, such as vision-language model
    inputs: str  # plural noun of the files, for messages

    @property
    def token_id(self) -> int:
        """Id of the token that is repeated for a file."""

    @property
    def fixed_tokens(self) -> int | None:
        """Tokens of every file; None if they depend on the file."""

    @property
    def template_text(self) -> str:
        """What chat templates write for a file."""

    @property
    def family_name(self) -> str:
        """Name of the model's family, for messages."""

    @property
    def takes_blank(self) -> bool:
        """True if batches without files get a blank one; the model would skip layers for them."""

    @property
    def needs_equal_counts(self) -> bool:
        """True if each row of a batch must hold the same number of files."""

    def row_files(self, folder: str | None) -> RowFiles:
        """Return what reads the rows of a data set. folder: of relative paths; None: that of the data file."""

    def identity(self) -> dict[str, Any]:
        """Return all that an example's tokens depend on, for the key of the data cache."""

    def read(self, path: str) -> FileInputs:
        """Return the model inputs of one file."""

    def blank(self) -> FileInputs:
        """Return the inputs of a small blank file."""

    def batch_inputs(
        self, input_ids: Tensor, files: Sequence[Sequence[FileInputs]], document_lengths: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Return what the files add to a batch. input_ids: (B, T), or (1, T) of packed rows. files: of each example."""

    def prompt_inputs(self, input_ids: Tensor, files: Sequence[Any]) -> dict[str, Tensor]:
        """Return the inputs of `generate` for a prompt (1, T) with one token per file, as `RowFiles.find` found it."""

    def save(self, folder: Path) -> None:
        """Write what transformers needs to read files for a saved model."""


class Modality:
    """What a model reads besides text. The defaults are those of a text model, which reads nothing else."""

    is_text: ClassVar[bool] = True
    inputs: ClassVar[str] = "text"  # plural noun of the files, for messages
    auto_class: ClassVar[str] = "AutoModelForCausalLM"  # transformers' name

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    @classmethod
    def reads(cls, config: PreTrainedConfig) -> bool:
        """Return whether a configuration describes a model of this modality."""
        return True

    @property
    def facts(self) -> ModalityFacts:
        """What planning needs to know. Raises UserError for a model that cannot be trained."""
        return ModalityFacts()

    @property
    def tokens_without_embedding(self) -> frozenset[int]:
        """Ids of tokens that stand for files, and may have no row in the embedding."""
        return frozenset()

    def check_shared_rows(self) -> None:
        """Raise UserError if `parallel.cp_size` cannot split rows with files."""

    def in_language_model(self, name: str) -> bool:
        """Return whether a parameter belongs to the language model, not to a tower. A module's name ends in a dot."""
        return True

    def attn_implementation(self, name: str) -> str | dict[str, str]:
        """Return transformers' argument that gives the attention `name`, made for documents, to the language model."""
        return name

    def text_positions(self, position_ids: Tensor) -> Tensor:
        """Return the model's position_ids of a packed row (1, T) without files."""
        return position_ids

    def prepare(self, model: PreTrainedModel, recipe: TaskOptions) -> None:
        """Freeze the parts that the recipe freezes and register the hooks that training needs."""

    def tower_shape(self, model: PreTrainedModel) -> TowerShape | None:
        """Return the sizes that predict the tower's memory; None without a tower, or if they do not predict it."""
        return None

    def load_reader(
        self,
        model: ModelOptions,
        recipe: TaskOptions | None,
        tokenizer: PreTrainedTokenizerBase,
        origin: ModelOrigin = RECIPE_MODEL,
    ) -> ModalityReader | None:
        """Return the reader of files; None for a text model. Raises UserError.

        recipe: None uses the limits in the model's own files, for generation.
        """
        return None


# ---- marks: places of files in the texts of a row, until the tokens of the files are known

# A mark is the file's number in its row between two noncharacters of Unicode, which no exchanged text contains.
_SIGN = "\ufdd4"
MARK = re.compile(f"{_SIGN}(\\d+){_SIGN}")


def mark_of(number: int) -> str:
    """Return the mark of the file with this number."""
    return f"{_SIGN}{number}{_SIGN}"


def has_sign(text: str) -> bool:
    """Return whether a text could be taken for one with marks."""
    return _SIGN in text


def marked_parts(text: str, part_type: str) -> list[dict[str, Any]]:
    """Split a text with marks into the parts that chat templates read: files, and the texts between them."""
    parts: list[dict[str, Any]] = []
    for place, piece in enumerate(MARK.split(text)):  # texts, and at odd places the numbers of the marks between them
        parts.append({"type": part_type} if place % 2 else {"type": "text", "text": piece})
    return [part for part in parts if part.get("text") != ""] or parts[-1:]


# ---- modalities by configuration


def modality_of(config: PreTrainedConfig) -> Modality:
    """Return the modality of the model that a configuration describes."""
    kind = next((found for found in known_modalities() if found.reads(config)), Modality)
    return kind(config)


@cache
def known_modalities() -> tuple[type[Modality], ...]:
    """Return the classes of all modalities. Text has none."""
    package = __name__.rpartition(".")[0]
    folders = pkgutil.iter_modules(importlib.import_module(package).__path__)
    names = [found.name for found in folders if found.ispkg]
    return tuple(importlib.import_module(f"{package}.{name}.spec").MODALITY for name in names)
