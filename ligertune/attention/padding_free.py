"""Choose between padded (B, T) and padding-free (1, sum T) micro-batches, and the attention for them.

A padding-free micro-batch is a packed row of its examples, so the same attention functions serve both. The examples of
a step and its loss do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ligertune.attention.choice import DOCUMENT_ATTENTION, choose_attention
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
# Tokens of a micro-batch from which our attention pays even where no padding is saved. A step of Llama-3-8B layers took
# 1.2 % less time with it on 32 rows of 512, and 0.3 % more on 4 rows (H100,
# `scripts/bench_e2e --only llama --baselines with-attention`).
ENOUGH_TOKENS = 8192


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
    return _LayoutChoice(options, config, machine, precision, lengths).choose()


@dataclass(frozen=True)
class _LayoutChoice:
    options: BatchLayoutOptions
    config: PreTrainedConfig
    machine: Machine
    precision: Precision
    lengths: np.ndarray | None

    def choose(self) -> tuple[AttentionChoice, bool]:
        options, wanted = self.options, self.options.padding_free
        if wanted == "auto" and options.document_attention is True and not options.few_shapes:
            wanted = True
        if options.packing or wanted is False:
            return self._attention(packing=options.packing), False
        if wanted is True:
            return self._required()
        return self._where_it_pays() or (self._attention(packing=False), False)

    def _attention(self, *, packing: bool) -> AttentionChoice:
        options = self.options
        if options.document_attention is True and not packing:
            raise UserError(
                f"kernels.attention: the examples of a {self.config.model_type} model do not share a row here, and "
                "this attention is for examples that do.",
                hint="Leave it out.",
            )
        return choose_attention(
            options.attn_implementation,
            self.config,
            self.machine,
            self.precision,
            packing=packing,
            cp_size=options.cp_size,
            own_kernel=options.document_attention,
        )

    def _required(self) -> tuple[AttentionChoice, bool]:
        """Return the layout where the recipe asks for padding-free batches, or for our attention, which needs them."""
        family = family_of(self.config)
        if family is not None and not family.packs:
            if self.options.padding_free == "auto":
                return self._attention(packing=False), False
            raise UserError(f"{KEY}: examples of a row would see each other's images in {family.name}.", hint=_HINT)
        try:
            return self._attention(packing=True), True
        except UserError as problem:
            raise about_padding_free(problem) from problem

    def _where_it_pays(self) -> tuple[AttentionChoice, bool] | None:
        """Return a padding-free layout that the recipe did not ask for, or None if it is impossible or does not pay."""
        options, lengths = self.options, self.lengths
        # With few_shapes each shape is compiled or captured, and the number of documents would be one more dimension.
        free = options.kernels_enabled and self.machine.vendor != "cpu" and not options.few_shapes
        if not free or has_vision(self.config):
            return None
        try:
            found = self._attention(packing=True)
        except UserError:  # its message is about packing, which the recipe does not ask for
            return None
        rows = options.micro_batch_size
        has_padding = rows != 1 and (lengths is None or bool((lengths != lengths[0]).any()))
        is_large = lengths is not None and rows != "auto" and lengths.mean() * rows >= ENOUGH_TOKENS
        pays = has_padding or (found.implementation == DOCUMENT_ATTENTION and is_large)
        return (found, True) if found.one_launch and pays else None


_HINT = f"Write {KEY}: false, or leave it out."


def about_padding_free(problem: UserError) -> UserError:
    """Return an error about `data.packing` as one about `data.padding_free`, which the recipe asked for."""
    if not problem.message.startswith("data.packing:"):
        return problem
    return UserError(problem.message.replace("data.packing:", f"{KEY}:", 1), hint=_HINT)
