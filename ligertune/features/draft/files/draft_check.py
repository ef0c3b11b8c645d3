"""Check of a written draft head: its files, read back, are the trained head, and give its logits on its target."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.errors import UserError
from ligertune.features.draft.draft_cache import DraftCache, run_head
from ligertune.features.draft.draft_config import rope_parameters_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.files.draft_files import CONFIG, DRAFT_HEAD, DraftFiles, DraftTarget, read_draft_files
from ligertune.features.draft.target_states import StateCapture
from ligertune.models.read_config import config_value
from ligertune.models.score_head import embedding_of


@dataclass(frozen=True)
class DraftCheck:
    """What was compared, bit for bit. coverage: the share of the target's vocabulary that the head drafts."""

    folder: str
    layout: str
    tokens: int
    coverage: float


@torch.no_grad()
def check_draft_head(
    folder: Path, target: PreTrainedModel, trained: DraftHead | None, input_ids: Sequence[int]
) -> DraftCheck:
    """Read a folder in either layout, and compare it with its target and with the trained head.

    trained: None compares with the target only. input_ids: a text of the target, of two tokens at least. Raises
    UserError for the first difference; its exit code is 1 if only the logits differ.
    """
    files = read_draft_files(folder, target.config)
    _check_config(files, target.config, trained)
    _check_embedding(files, embedding_of(target).weight)
    head = files.head().to(embedding_of(target).weight.device)
    if trained is not None:
        as_written = copy.deepcopy(trained).to(head.fc.weight.device, head.fc.weight.dtype)
        expected = first_logits(as_written, target, input_ids)
        found = first_logits(head, target, input_ids)
        if not torch.equal(found, expected):
            largest = float((found - expected).abs().max())
            raise UserError(
                f"{folder}: the logits of the draft head differ from the trained ones by up to {largest:.1e}.",
                hint="Do not serve it; write it again.",
                exit_code=1,
            )
    return DraftCheck(
        str(folder), files.layout, len(input_ids) - 1, files.config.draft_vocab_size / files.config.vocab_size
    )


def check_written_head(folder: Path, trained: DraftHead, target: DraftTarget) -> None:
    """Read a folder in either layout, and compare it with the head that was written there, bit for bit.

    Nothing is computed, so the head and the target's embedding may be anywhere. Raises UserError, with exit code 1 if
    the files are a head of the target, but not this one.
    """
    files = read_draft_files(folder, target.config)
    _check_embedding(files, target.embedding)
    different = [
        name
        for name, tensor in trained.state_dict().items()
        if files.tensors[name].dtype != tensor.dtype or not torch.equal(files.tensors[name], tensor.to("cpu"))
    ]
    if files.config != trained.config:
        different.append(CONFIG)
    if different:
        raise UserError(
            f"{folder}: {different[0]} is not that of the trained draft head.",
            hint="Do not serve it; resume the run, which writes it again.",
            exit_code=1,
        )


def _check_embedding(files: DraftFiles, embedding: Tensor) -> None:
    """Raise UserError if the files hold another embedding than the target's (V, E)."""
    if files.embedding is not None and not torch.equal(files.embedding, embedding.to("cpu", files.embedding.dtype)):
        raise DRAFT_HEAD.error(f"{files.folder}: embed_tokens.weight is not the embedding of the target.")


def _check_config(files: DraftFiles, target: PreTrainedConfig, trained: DraftHead | None) -> None:
    """Raise UserError for layer ids, rotary embeddings or positions other than the target's and the trained head's."""
    config = files.config
    text = target.get_text_config()
    trained_ids = files.trained_ids if trained is None else trained.config.layer_ids
    if trained_ids is not None and config.layer_ids != trained_ids:
        raise DRAFT_HEAD.error(
            f"{files.folder} reads the layers {list(config.layer_ids)} of its target, and it was trained on "
            f"{list(trained_ids)}.",
            hint="A head that reads other layers drafts badly, without an error.",
        )
    positions = config_value(text, "max_position_embeddings")
    if config.max_position_embeddings != positions:
        raise DRAFT_HEAD.error(
            f"{files.folder}: max_position_embeddings is {config.max_position_embeddings}, and that of the target "
            f"{positions}."
        )
    if dict(config.rope_parameters) != rope_parameters_of(text):
        raise DRAFT_HEAD.error(
            f"{files.folder}: its rotary embeddings are {dict(config.rope_parameters)}, and those of the target "
            f"{rope_parameters_of(text)}."
        )


@torch.no_grad()
def first_logits(head: DraftHead, target: PreTrainedModel, input_ids: Sequence[int]) -> Tensor:
    """Return the head's logits (T - 1, D) of the first step on a text: row i predicts token i + 2."""
    device = embedding_of(target).weight.device
    ids = torch.tensor([list(input_ids)], device=device)
    with StateCapture(target, head.config.layer_ids) as capture:
        target.eval()(input_ids=ids, use_cache=False)
        states = capture.take()[0, :-1].to(head.fc.weight.dtype)
    hidden = head.combine(states)
    embedded = F.embedding(ids[0, 1:], embedding_of(target).weight).to(hidden.dtype)
    positions = torch.arange(len(hidden), device=device)
    return head.logits(head.norm(run_head(head, DraftCache(head), hidden, embedded, positions)))
