"""DraftConfig: sizes, rotary embeddings and vocabulary of a draft head, made from the configuration of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ligertune.errors import UserError
from ligertune.models.read_config import FULL, OF_ALL_ROPE, ROPE_KEYS, config_value
from ligertune.models.shape import depth_of

NUM_STATES = 3  # servers build `fc` for the states of three layers
STATIC_ROPE = ("default", "linear", "yarn", "llama3")  # angles of a position do not depend on the text's length


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft head, whose layers are those of Llama.

    layer_ids: the target's layers whose input the head reads, from 0. target_layers: the number of all of them.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    target_layers: int
    num_layers: int = 1

    @property
    def reduces_vocabulary(self) -> bool:
        """Whether the head predicts part of the vocabulary, so that it has the tables d2t and t2d."""
        return self.draft_vocab_size < self.vocab_size

    def llama_config(self) -> PreTrainedConfig:
        """Return the configuration of the head's layers."""
        return AutoConfig.for_model(
            "llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            hidden_act="silu",
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
        )


def draft_config_of(
    target: PreTrainedConfig,
    *,
    draft_vocab_size: int | None = None,
    layer_ids: tuple[int, ...] | None = None,
    num_layers: int = 1,
) -> DraftConfig:
    """Return the sizes of a draft head for a target. Raises UserError for layer ids or targets that it cannot have.

    draft_vocab_size: None, or one as large as the target's vocabulary, for a head without tables.
    """
    text = target.get_text_config()
    heads = config_value(text, "num_attention_heads")
    hidden_size = config_value(text, "hidden_size")
    if not heads or not hidden_size:
        raise UserError(f"A {text.model_type} model has no attention heads, from which a draft head takes its sizes.")
    # queries and keys of multi-head latent attention have a size of their own
    own_head_dim = None if config_value(text, "kv_lora_rank") else config_value(text, "head_dim")
    vocab_size = config_value(text, "vocab_size")
    return DraftConfig(
        hidden_size=hidden_size,
        intermediate_size=config_value(text, "intermediate_size") or 4 * hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=config_value(text, "num_key_value_heads", heads),
        head_dim=own_head_dim or hidden_size // heads,
        rms_norm_eps=config_value(text, "rms_norm_eps", 1e-6),
        rope_parameters=rope_parameters_of(text),
        max_position_embeddings=config_value(text, "max_position_embeddings", 2048),
        vocab_size=vocab_size,
        draft_vocab_size=min(draft_vocab_size or vocab_size, vocab_size),
        layer_ids=check_layer_ids(layer_ids or default_layer_ids(depth_of(text)), depth_of(text)),
        target_layers=depth_of(text),
        num_layers=num_layers,
    )


def server_layer_ids(depth: int) -> tuple[int, ...]:
    """Return the layers whose input servers capture if the files name none, for a target of this depth."""
    return (2, depth // 2, depth - 3)


def default_layer_ids(depth: int) -> tuple[int, ...]:
    """Return the layers of a target of this depth whose input the head reads: those of servers if they differ.

    Targets of three to six layers have the middle three. Raises UserError below three.
    """
    if depth < NUM_STATES:
        raise UserError(f"The model has {depth} layers, and a draft head reads the inputs of {NUM_STATES}.")
    early, middle, late = server_layer_ids(depth)
    return (early, middle, late) if early < middle < late else (middle - 1, middle, middle + 1)


def check_layer_ids(layer_ids: tuple[int, ...], depth: int, *, key: str = "draft.layer_ids") -> tuple[int, ...]:
    """Return the layer ids. Raises UserError unless they are three different layers of the target, in rising order.

    depth: number of the target's layers. key: what the message names.
    """
    if len(layer_ids) != NUM_STATES or any(layer not in range(depth) for layer in layer_ids):
        raise UserError(f"{key}: {list(layer_ids)} must be {NUM_STATES} layers of the target, from 0 to {depth - 1}.")
    if list(layer_ids) != sorted(set(layer_ids)):
        raise UserError(f"{key}: {list(layer_ids)} must be different layers in rising order.")
    return tuple(layer_ids)


def rope_parameters_of(text: PreTrainedConfig) -> dict[str, Any]:
    """Return the target's rotary embeddings over a whole head. Raises UserError for those that depend on the length."""
    found = config_value(text, "rope_parameters", {})
    found = found.get(FULL, found)  # models with windows have others there
    kind = found.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        raise UserError(
            f"The model has rotary embeddings of rope_type {kind}, which draft heads do not have.",
            hint=f"Use a model with one of {', '.join(STATIC_ROPE)}.",
        )
    known = (*OF_ALL_ROPE, *ROPE_KEYS[kind])
    kept = {name: found[name] for name in known if found.get(name) is not None}
    return {"rope_type": kind, "rope_theta": 10000.0, **kept}
