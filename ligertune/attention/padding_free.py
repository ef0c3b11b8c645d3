"""Whether the examples of a micro batch lie one behind another in one row, so that no padded slot is computed.

A packed row is such a row, and so the same attention serves both. What a step trains on, and its loss, stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ligertune.attention.choice import OURS, choose_attention
from ligertune.errors import UserError
from ligertune.vision.families import family_of, has_vision

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedConfig

    from ligertune.attention.choice import AttentionChoice
    from ligertune.hardware import Machine
    from ligertune.planning.options import BatchLayoutOptions
    from ligertune.planning.precision import Precision

KEY = "data.padding_free"


def choose_rows(
    options: BatchLayoutOptions,
    config: PreTrainedConfig,
    machine: Machine,
    precision: Precision,
    *,
    lengths: np.ndarray | None = None,
) -> tuple[AttentionChoice, bool]:
    """The attention, and whether batches are padding-free; a UserError where the recipe asks for what cannot be.

    lengths: tokens of the examples, where known. Packed rows need no word about padding: for them it is False.
    """

    ours = options.document_attention

    def attention(*, packing: bool) -> AttentionChoice:
        if ours is True and not packing:
            raise UserError(
                f"kernels.attention: the examples of a {config.model_type} model do not share a row here, and it is "
                "for those that do.",
                hint="Leave it out.",
            )
        return choose_attention(
            options.attn_implementation,
            config,
            machine,
            precision,
            packing=packing,
            cp_size=options.cp_size,
            ours=ours,
        )

    wanted = options.padding_free
    if wanted == "auto" and ours is True and not options.few_shapes:
        wanted = True
    if options.packing or wanted is False:
        return attention(packing=options.packing), False
    if wanted is True:
        family = family_of(config)
        if family is not None and not family.packs:
            if options.padding_free == "auto":
                return attention(packing=False), False
            raise UserError(f"{KEY}: examples of a row would see each other's images in {family.name}.", hint=_HINT)
        try:
            return attention(packing=True), True
        except UserError as problem:
            raise asked_for(problem) from problem
    if _costs_nothing(options, machine) and not has_vision(config):
        try:
            found = attention(packing=True)
        except UserError:  # what it says is about packing, which nobody asked for
            return attention(packing=False), False
        ours_pays = found.implementation == OURS and _is_large(options, lengths)
        if found.one_launch and (_has_padding(options, lengths) or ours_pays):
            return found, True
    return attention(packing=False), False


_HINT = f"Write {KEY}: false, or leave it out."


def asked_for(problem: UserError) -> UserError:
    """What keeps a model from being packed, said of the key by which its examples were to share a row."""
    if not problem.message.startswith("data.packing:"):
        return problem
    return UserError(problem.message.replace("data.packing:", f"{KEY}:", 1), hint=_HINT)


def _costs_nothing(options: BatchLayoutOptions, machine: Machine) -> bool:
    """Whether examples may share a row unasked: with kernels, and not where each shape is a graph, for which one more
    size would change, the number of documents.
    """
    return options.kernels_enabled and machine.vendor != "cpu" and not options.few_shapes


# Tokens of a micro batch from which our attention is worth a row where nothing was padded. A step of Llama-3-8B layers
# took 1.2 % less time with it on 32 rows of 512, and on 4 no less (0.3 % more, with copies that are gone since; H100,
# `scripts/bench_e2e --only llama --baselines with-attention`).
ENOUGH = 8192


def _is_large(options: BatchLayoutOptions, lengths: np.ndarray | None) -> bool:
    known = lengths is not None and options.micro_batch_size != "auto"
    return known and lengths.mean() * options.micro_batch_size >= ENOUGH


def _has_padding(options: BatchLayoutOptions, lengths: np.ndarray | None) -> bool:
    if options.micro_batch_size == 1:
        return False
    return lengths is None or bool((lengths != lengths[0]).any())
