"""Choose between padded (B, T) and padding-free (1, sum T) micro-batches, and the attention for them.

A padding-free micro-batch is a packed row of its examples, so the same attention functions serve both. The examples of
a step and its loss do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ligertune.attention.choice import DOCUMENT_ATTENTION, AttentionDemands, choose_attention
from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError
from ligertune.planning.memory.layer_bytes import FA4_OR_DOCUMENT_ATTENTION

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedConfig

    from ligertune.attention.choice import AttentionChoice
    from ligertune.hardware import Machine
    from ligertune.planning.options import BatchLayoutOptions
    from ligertune.planning.precision import Precision

KEY = "data.padding_free"
# Tokens of a micro-batch from which our attention pays even where no padding is saved. A step of Llama-3-8B layers took
# 1.2 % less time with it on 32 rows of 512, and 0.3 % more on 4 rows (H100,
# `scripts/bench llama --sides with,with-attention`).
ENOUGH_TOKENS = 8192
# Tokens of an example from which ours is taken in any micro-batch, because attention is a large part of a layer there.
# Whole steps with and without it were not measured.
LONG_EXAMPLE = 2048


def choose_batch_layout(
    options: BatchLayoutOptions,
    config: PreTrainedConfig,
    machine: Machine,
    precision: Precision,
    *,
    lengths: np.ndarray | None = None,
) -> tuple[AttentionChoice, bool]:
    """Return the attention, and whether batches are padding-free (False for packed rows, which have no padding).

    lengths: tokens of the examples, if known. Raises UserError if the recipe's choice is impossible.
    """
    attention = partial(_attention, options, config, machine, precision)
    wanted = options.padding_free
    if wanted == "auto" and options.document_attention is True and not options.few_shapes:
        wanted = True
    if options.packing or wanted is False:
        return attention(packing=options.packing), False
    if wanted is True:
        return _required(options, config, attention)
    # With few_shapes each shape is compiled or captured, and the number of tokens would be one more dimension.
    shapes_repeat = not options.few_shapes or has_one_length(lengths)
    free = options.kernels_enabled and machine.vendor != "cpu" and shapes_repeat
    found = _where_it_pays(options, attention, lengths) if free and modality_of(config).is_text else None
    return (attention(packing=False), False) if found is None else (found, True)


def has_one_length(lengths: np.ndarray | None) -> bool:
    """Return whether all examples have the same number of tokens. lengths: None if unknown."""
    return lengths is not None and len(lengths) > 0 and bool((lengths == lengths[0]).all())


def _attention(
    options: BatchLayoutOptions, config: PreTrainedConfig, machine: Machine, precision: Precision, *, packing: bool
) -> AttentionChoice:
    if options.document_attention is True and not packing:
        raise UserError(
            f"kernels.attention: the examples of a {config.model_type} model do not share a row here, and "
            "this attention is for examples that do.",
            hint="Leave it out.",
        )
    demands = AttentionDemands(
        wanted=options.attn_implementation,
        packing=packing,
        cp_size=options.cp_size,
        own_kernel=options.document_attention,
        deterministic=options.full_determinism,
        few_shapes=options.few_shapes,
        why_not_packed=options.why_not_packed,
    )
    return choose_attention(demands, config, machine, precision)


def _required(
    options: BatchLayoutOptions, config: PreTrainedConfig, attention: Callable[..., AttentionChoice]
) -> tuple[AttentionChoice, bool]:
    """Return the layout where the recipe asks for padding-free batches, or for our attention, which needs them."""
    facts = modality_of(config).facts
    if not facts.packs_exactly:
        if options.padding_free == "auto":
            return attention(packing=False), False
        raise UserError(
            f"{KEY}: examples of a row would see each other's {facts.inputs} in {facts.family}.", hint=_HINT
        )
    try:
        return attention(packing=True), True
    except UserError as problem:
        raise about_padding_free(problem) from problem


def _where_it_pays(
    options: BatchLayoutOptions, attention: Callable[..., AttentionChoice], lengths: np.ndarray | None
) -> AttentionChoice | None:
    """Return the attention of padding-free batches that the recipe did not ask for; None if they do not pay."""
    try:
        found = attention(packing=True)
    except UserError:  # its message is about packing, which the recipe does not ask for
        return None
    rows = options.micro_batch_size
    has_padding = rows != 1 and not has_one_length(lengths)
    is_large = lengths is not None and (
        lengths.mean() >= LONG_EXAMPLE or (rows != "auto" and lengths.mean() * rows >= ENOUGH_TOKENS)
    )
    pays = has_padding or (found.implementation in (DOCUMENT_ATTENTION, FA4_OR_DOCUMENT_ATTENTION) and is_large)
    return found if found.one_launch and pays else None


_HINT = f"Write {KEY}: false, or leave it out."


def about_padding_free(problem: UserError) -> UserError:
    """Return an error about `data.packing` as one about `data.padding_free`, which the recipe asked for."""
    if not problem.message.startswith("data.packing:"):
        return problem
    return UserError(problem.message.replace("data.packing:", f"{KEY}:", 1), hint=_HINT)
