"""Whether the examples of a micro batch lie one behind another in one row, so that no padded slot is computed.

A packed row is such a row, and so the same attention serves both. What a step trains on, and its loss, stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ligertune.attention.choice import OURS, choose_attention
from ligertune.errors import UserError
from ligertune.vision.families import family_of, sees

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedConfig

    from ligertune.attention.choice import AttentionChoice
    from ligertune.hardware import Machine
    from ligertune.planning.plan import Precision
    from ligertune.recipe import Recipe

KEY = "data.padding_free"


def choose_rows(
    recipe: Recipe,
    config: PreTrainedConfig,
    machine: Machine,
    precision: Precision,
    *,
    lengths: np.ndarray | None = None,
) -> tuple[AttentionChoice, bool]:
    """The attention, and whether batches are padding-free; a UserError where the recipe asks for what cannot be.

    lengths: tokens of the examples, where known. Packed rows need no word about padding: for them it is False.
    """

    ours = _ours(recipe)

    def attention(*, packing: bool) -> AttentionChoice:
        if ours is True and not packing:
            raise UserError(
                f"kernels.attention: the examples of a {config.model_type} model do not share a row here, and it is "
                "for those that do.",
                hint="Leave it out.",
            )
        return choose_attention(
            recipe.model.attn_implementation,
            config,
            machine,
            precision,
            packing=packing,
            cp_size=recipe.parallel.cp_size,
            ours=ours,
        )

    wanted = recipe.data.padding_free
    if wanted == "auto" and ours is True and not recipe.train.few_shapes:
        wanted = True
    if recipe.data.packing or wanted is False:
        return attention(packing=recipe.data.packing), False
    if wanted is True:
        family = family_of(config)
        if family is not None and not family.packs:
            if recipe.data.padding_free == "auto":
                return attention(packing=False), False
            raise UserError(f"{KEY}: examples of a row would see each other's images in {family.name}.", hint=_HINT)
        try:
            return attention(packing=True), True
        except UserError as problem:
            raise asked_for(problem) from problem
    if _costs_nothing(recipe, machine) and not sees(config):
        try:
            found = attention(packing=True)
        except UserError:  # what it says is about packing, which nobody asked for
            return attention(packing=False), False
        ours_pays = found.implementation == OURS and _is_large(recipe, lengths)
        if found.one_launch and (_has_padding(recipe, lengths) or ours_pays):
            return found, True
    return attention(packing=False), False


def _ours(recipe: Recipe) -> Literal["auto"] | bool:
    """Whether attention is to be our own, or may be. What compiled layers do with it was not timed."""
    kernels = recipe.kernels
    if kernels.enabled is False or (kernels.attention == "auto" and recipe.train.torch_compile):
        return False
    return kernels.attention


def without_padding_free(recipe: Recipe) -> Recipe:
    """The recipe, and its batches are padded."""
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"padding_free": False})})


def note_on_packed(recipe: Recipe) -> tuple[str, ...]:
    """What there is to say where packed rows are asked to be padding-free."""
    if recipe.data.packing and recipe.data.padding_free is True:
        return (f"{KEY} says nothing here: packed rows (data.packing) have no padding",)
    return ()


_HINT = f"Write {KEY}: false, or leave it out."


def asked_for(problem: UserError) -> UserError:
    """What keeps a model from being packed, said of the key by which its examples were to share a row."""
    if not problem.message.startswith("data.packing:"):
        return problem
    return UserError(problem.message.replace("data.packing:", f"{KEY}:", 1), hint=_HINT)


def _costs_nothing(recipe: Recipe, machine: Machine) -> bool:
    """Whether examples may share a row unasked: with kernels, and not where each shape is a graph, for which one more
    size would change, the number of documents.
    """
    return recipe.kernels.enabled is not False and machine.vendor != "cpu" and not recipe.train.few_shapes


# Tokens of a micro batch from which our attention is worth a row where nothing was padded. A step of Llama-3-8B layers
# took 1.2 % less time with it on 32 rows of 512, and on 4 no less (0.3 % more, with copies that are gone since; H100,
# `scripts/bench_e2e --only llama --baselines with-attention`).
ENOUGH = 8192


def _is_large(recipe: Recipe, lengths: np.ndarray | None) -> bool:
    return lengths is not None and lengths.mean() * recipe.train.per_device_train_batch_size >= ENOUGH


def _has_padding(recipe: Recipe, lengths: np.ndarray | None) -> bool:
    if recipe.train.per_device_train_batch_size == 1:
        return False
    return lengths is None or bool((lengths != lengths[0]).any())
