"""Check on the model itself that documents of a packed row do not influence each other."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligertune.attention.packed_documents import ROWS
from ligertune.data.batching.collate import collate_packed
from ligertune.data.examples import Example
from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError, message_of
from ligertune.models.mixers.layer_parts import parts_of_layers
from ligertune.models.score_head import gives_scores
from ligertune.models.shape import text_layers

FIRST = 13  # tokens of the first document: small and odd
SECOND = 11  # tokens of the second
EXCHANGES = 4  # other first documents: one of them alone may hardly move the second one's logits
SLOW_DECAY = 0.05  # A = exp(A_log): a token then keeps about 0.94 of the state
# The largest change of the second document's logits, relative to the change of the first's, that rounding explains.
# Rows of a matrix product do not depend on each other, so it is zero, except that experts get other tokens in a batch.
ROUNDING = 1e-5
ROUNDING_OF_EXPERTS = 5e-2  # bfloat16; a leak changes a token's logits about as much as changing the token itself
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class LogitsAreNaN(UserError):
    """The model computes NaN, whatever its batches look like."""


def document_leak(model: PreTrainedModel, *, multiple_of: int) -> float:
    """Return how far the logits of a packed row's second document change if the first document changes.

    The result is relative to the change of the first document's logits; 0 means that the documents are isolated.
    Raises LogitsAreNaN.
    Attention isolates them by construction (`attention.choice`), but recurrence, convolutions, experts of limited
    capacity or continued positions may not.
    """
    vocab_size = model.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    first, second, *others = (rng.integers(vocab_size, size=n) for n in (FIRST, SECOND, *[FIRST] * EXCHANGES))
    with slow_decay(model):
        logits = _logits_of(model, [first, second], multiple_of)
        exchanged = torch.stack([_logits_of(model, [other, second], multiple_of) for other in others])
    change = (exchanged - logits).abs().amax(-1)  # (EXCHANGES, tokens)
    if bool(change.isnan().any()):
        raise LogitsAreNaN(
            f"model.model_name_or_path: this {type(model).__name__} computes NaN before it is trained.",
            hint="Its weights are damaged, or too large for model.dtype.",
        )
    own = change[:, :FIRST].amax(1)
    leak = change[:, FIRST:].amax(1)
    return float(torch.where(own > 0, leak / own, leak).max())


def _logits_of(model: PreTrainedModel, documents: Sequence[np.ndarray], multiple_of: int) -> Tensor:
    """Return the logits (tokens, V) of a packed row without its padding, fp32."""
    examples = [Example(tokens, tokens, "") for tokens in documents]
    batch = collate_packed(examples, pad_token_id=0, pad_to_multiple_of=multiple_of)
    del batch["labels"]
    if gives_scores(model.config):  # one for each token, as the logits of other models
        batch["score_rows"] = torch.arange(batch["input_ids"].numel())
    batch["position_ids"] = modality_of(model.config).text_positions(batch["position_ids"])
    logits: Tensor = evaluate_batch(model, batch, model.device).logits
    return logits[0, : sum(map(len, documents))].float()


@contextlib.contextmanager
def slow_decay(model: nn.Module) -> Iterator[None]:
    """Let recurrences forget slowly: a state that flows into the next document is then seen above rounding.

    Models begin with decays up to exp(-16) a token, with which it is gone after one.
    """
    decays = [p for name, p in model.named_parameters() if name.rpartition(".")[2] == "A_log"]
    kept = [p.detach().clone() for p in decays]
    with torch.no_grad():
        for p in decays:
            p.fill_(math.log(SLOW_DECAY))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, values in zip(decays, kept, strict=True):
                p.copy_(values)


@torch.no_grad()
def evaluate_batch(model: nn.Module, batch: dict[str, Any], device: torch.device, **loss_inputs: Any) -> Any:
    """Return the model's output for a batch, in evaluation mode."""
    was_training = model.training
    model.eval()
    tensors = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    output = model(**tensors, **loss_inputs, use_cache=False)
    model.train(was_training)
    return output


def check_document_isolation(model: PreTrainedModel, *, multiple_of: int) -> None:
    """Raise UserError if documents of a packed row influence each other or the model refuses packed rows."""
    try:
        leak = document_leak(model, multiple_of=multiple_of)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a forward may fail in any way, for instance without a mask
        raise UserError(f"data.packing: {_failure(model, error)}.", hint="Write data.packing: false.") from error
    experts = any(getattr(model.config.get_text_config(), name, None) for name in EXPERTS)
    if not leak <= (ROUNDING_OF_EXPERTS if experts and model.dtype != torch.float32 else ROUNDING):
        raise UserError(
            f"data.packing: documents of a packed row see each other in this {type(model).__name__} "
            f"(changing one moves the other's logits {leak:.1e} times as far as its own).",
            hint="Write data.packing: false.",
        )


def why_not_isolated(model: PreTrainedModel) -> str | None:
    """Return why documents of a packed row would influence each other, or None if the model's forward shows no reason.

    model: on the meta device, with per_document attention and `prepare_masks`. A plan has no weights, so it looks for
    layers that refuse a packed row or attend by functions of their own; `check_document_isolation` compares numbers.
    """
    with first_of_each_kind(model):
        reason = _try_packed_row(model)
    if reason is None:
        return None
    return _try_packed_row(model)  # some models cannot run with fewer layers, so the whole model decides


@contextlib.contextmanager
def first_of_each_kind(model: PreTrainedModel) -> Iterator[None]:
    """Leave out the last layers, as far as each has a layer of its kind before it. They are put back at the end.

    It saves 0.3 s of planning a model of 32 layers. Layers are of one kind if they print the same and have the same
    entry in the configuration's `layer_types`.
    """
    layers = text_layers(model)
    if layers is None:
        yield
        return
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    kinds = list(itertools.zip_longest(map(repr, layers), types))
    count = 1 + max(kinds.index(kind) for kind in kinds)
    left_out = list(layers[count:])
    del layers[count:]
    try:
        yield
    finally:
        layers.extend(left_out)


def _try_packed_row(model: PreTrainedModel) -> str | None:
    """Run a packed row, and return what `why_not_isolated` returns."""
    documents = [np.zeros(FIRST, dtype=np.int64), np.zeros(SECOND, dtype=np.int64)]
    ROWS.attended = ROWS.mixed = False
    name = type(model).__name__
    try:
        _logits_of(model, documents, multiple_of=1)
    except UserError as problem:
        return problem.message.removeprefix("data.packing: ").rstrip(".")
    except RuntimeError:
        # Meta tensors have no values to read, as routers of experts do. The class then tells where it attends.
        if ROWS.attended or model._supports_attention_backend:
            return None
    except Exception as error:
        return _failure(model, error)
    if ROWS.attended or (ROWS.mixed and not _attends(model)):
        return None
    return f"{name} does not attend by transformers' attention functions"


def _attends(model: PreTrainedModel) -> bool:
    """Return whether a layer attends; in Mamba 2, none does."""
    return any(parts.attention for parts in parts_of_layers(text_layers(model) or []))


def _failure(model: nn.Module, error: Exception) -> str:
    return f"this {type(model).__name__} takes no packed rows: {message_of(error)}".rstrip(".")
