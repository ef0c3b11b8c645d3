"""Before the first step: the model itself is asked whether documents of a packed row see each other.

Attention is chosen so that they do not (`model.attention_choice`), but what a model does between its tokens is its own
affair: recurrence, a convolution, experts of limited capacity, positions that go on. So one document of a row is
changed, and the logits of the other must stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ligertune.attention.padding_free import asked_for
from ligertune.data.batching.collate import collate_packed
from ligertune.data.examples import Example
from ligertune.errors import UserError
from ligertune.vision.families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.planning.plan import Plan

FIRST, SECOND = 13, 11  # tokens; odd, and few
# What rounding may move in the second document, as a share of what the change moves in the first. Rows of a product do
# not depend on each other, so there is none, but where experts are given other tokens beside the second document's.
ROUNDING = 1e-5
ROUNDING_OF_EXPERTS = 5e-2  # in bfloat16; a leak moves a first token about as much as the change itself
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def leak(model: PreTrainedModel, *, multiple_of: int) -> float:
    """How far the second document's logits move when the first document changes, as a share of how far those move."""
    device, vocab_size = model.device, model.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    first, other, second = (rng.integers(vocab_size, size=length) for length in (FIRST, FIRST, SECOND))
    logits = []
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for document in (first, other):
            examples = [Example(tokens, tokens, "") for tokens in (document, second)]
            batch = collate_packed(examples, pad_token_id=0, pad_to_multiple_of=multiple_of)
            del batch["labels"]
            if _has_sections(model):
                batch["position_ids"] = batch["position_ids"].expand(4, 1, -1)
            tensors = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            logits.append(model(**tensors, use_cache=False).logits[0].float())
    model.train(was_training)
    moved = (logits[0] - logits[1]).abs().amax(-1)  # (T,)
    return float(moved[FIRST : FIRST + SECOND].max() / moved[:FIRST].max())


def _has_sections(model: PreTrainedModel) -> bool:
    """Whether positions are of the text, and of time, height and width: (4, 1, T)."""
    family = family_of(model.config)
    return family is not None and family.positions == "sections"


def check_isolation(model: PreTrainedModel, *, multiple_of: int) -> None:
    """A UserError where a document of a packed row sees another, or the model cannot be asked."""
    try:
        found = leak(model, multiple_of=multiple_of)
    except (ValueError, TypeError) as error:  # how models refuse packed rows, or keywords that they do not know
        raise UserError(
            f"data.packing: this {type(model).__name__} takes no packed rows: {str(error).partition(chr(10))[0]}",
            hint="Write data.packing: false.",
        ) from error
    experts = any(getattr(model.config.get_text_config(), name, None) for name in EXPERTS)
    if not found <= (ROUNDING_OF_EXPERTS if experts and model.dtype != torch.float32 else ROUNDING):
        raise UserError(
            f"data.packing: documents of a packed row see each other in this {type(model).__name__} "
            f"(changing one moves the other's logits {found:.1e} times as far as its own).",
            hint="Write data.packing: false.",
        )


def why_not_joined(plan: Plan, model: PreTrainedModel) -> str | None:
    """What the model has against rows of several documents, in words; a UserError where the recipe asks for them."""
    try:
        check_isolation(model, multiple_of=plan.rows.multiple_of)
    except UserError as problem:
        if plan.rows.packed:
            raise
        if plan.data_options.padding_free is True:
            raise asked_for(problem) from problem
        return problem.message.removeprefix("data.packing: ")
    return None
