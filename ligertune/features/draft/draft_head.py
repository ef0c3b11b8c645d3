r"""DraftHead: an EAGLE-3 draft head, which predicts tokens from three hidden states of its target.

Row i reads token x_{i+1} and the state h_i. At the first step h_i = fc(g_i), where g_i concatenates the states of the
target that enter the layers `layer_ids`; at later steps h_i is the head's own state of the step before.

    e = embed(x_{i+1})                     the target's embedding, no parameter of the head
    a = attention(q, k, v of [input_layernorm(e), hidden_norm(h_i)]) + h_i
    s = a + mlp(post_attention_layernorm(a))            the state that the next step reads
    logits of x_{i+2} over the draft vocabulary = lm_head(norm(s))

Further layers (`num_layers` > 1) are plain Llama layers after the first. Parameters have the names of EAGLE-3's files
(https://github.com/SafeAILab/EAGLE): the first layer is `midlayer`, the next one `layers.1`.
Source: Li et al. 2025, EAGLE-3, https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from ligertune_kernels import RMSNorm, apply_rope, swiglu
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ligertune.features.draft.draft_config import DraftConfig


class Projected(NamedTuple):
    """Queries, keys and values of N rows, not rotated yet, and what is added to the output of attention."""

    query: Tensor  # (N, H, D)
    key: Tensor  # (N, K, D)
    value: Tensor  # (N, K, D)
    residual: Tensor  # (N, E)


class _Attention(nn.Module):
    """The projections of attention; `input_size` is 2E in the first layer."""

    def __init__(self, config: DraftConfig, input_size: int) -> None:
        super().__init__()
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))


class DraftLayer(nn.Module):
    """A decoder layer of the head, in two parts around its attention, which the caller computes.

    The first layer (`reads_embedding`) also reads the embedded token.
    """

    def __init__(self, config: DraftConfig, *, reads_embedding: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.self_attn = _Attention(config, config.hidden_size * (2 if reads_embedding else 1))
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if reads_embedding else None
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project_qkv(self, hidden: Tensor, embedded: Tensor) -> Projected:
        """Return queries, keys and values of hidden (N, E) and embedded tokens (N, E); later layers ignore those."""
        if self.hidden_norm is None:
            inputs = self.input_layernorm(hidden)
        else:
            inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        attention = self.self_attn
        projected = (attention.q_proj(inputs), attention.k_proj(inputs), attention.v_proj(inputs))
        query, key, value = (one.unflatten(-1, (-1, self.head_dim)) for one in projected)
        return Projected(query, key, value, residual=hidden)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the layer's state (N, E) from the output of attention (N, H, D) and the residual (N, E)."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """The draft head. d2t[d] + d is the target's id of draft token d; t2d marks the target's ids that it can draft.

    Both tables exist only if the draft vocabulary is smaller than the target's.
    """

    d2t: Tensor | None  # (D,) int64
    t2d: Tensor | None  # (V,) bool

    def __init__(self, config: DraftConfig, draft_ids: Tensor | None = None) -> None:
        """draft_ids (D,): the target's ids of the draft vocabulary, ascending; None: the first D, or all.

        Parameters are made in torch's default dtype and device, with torch's random initial values.
        """
        super().__init__()
        self.config = config
        hidden_size = config.hidden_size
        self.fc = nn.Linear(len(config.layer_ids) * hidden_size, hidden_size, bias=False)
        self.midlayer = DraftLayer(config, reads_embedding=True)
        later = {str(layer): DraftLayer(config, reads_embedding=False) for layer in range(1, config.num_layers)}
        self.layers = nn.ModuleDict(later)
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)
        tables = _vocabulary_tables(config, draft_ids) if config.reduces_vocabulary else (None, None)
        for name, table in zip(("d2t", "t2d"), tables, strict=True):
            self.register_buffer(name, table)
        # made at the first use, in float32: buffers are rounded when a module is moved to bfloat16
        self._frequencies: tuple[Tensor, float] | None = None

    def decoder_layers(self) -> Sequence[DraftLayer]:
        """Return all decoder layers in order."""
        later = [layer for layer in self.layers.values() if isinstance(layer, DraftLayer)]
        return (self.midlayer, *later)

    def combine(self, states: Tensor) -> Tensor:
        """Return the first state (N, E) from the target's states (N, 3E), concatenated by rising layer."""
        return self.fc(states)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin (N, D) of positions (N,) in `dtype`."""
        if self._frequencies is None or self._frequencies[0].device != positions.device:
            with torch.device("cpu"):  # also while parameters are made on the meta device
                rotary = LlamaRotaryEmbedding(self.config.llama_config())
            self._frequencies = (rotary.inv_freq.to(positions.device), rotary.attention_scaling)
        frequencies, scaling = self._frequencies
        angles = positions[:, None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (N, H, D) and keys (N, K, D) rotated by their positions (N,)."""
        cos, sin = self.rope(positions, query.dtype)
        turned, turned_key = apply_rope(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
        assert turned_key is not None
        return turned[0].transpose(0, 1), turned_key[0].transpose(0, 1)

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits (N, D) over the draft vocabulary from normed states (N, E), that is norm(state)."""
        return self.lm_head(normed)

    def draft_ids(self) -> Tensor:
        """Return the target's ids (D,) of the draft vocabulary."""
        places = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return places if self.d2t is None else places + self.d2t


def _vocabulary_tables(config: DraftConfig, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return d2t (D,) and t2d (V,). Raises ValueError unless draft_ids are D different ids in rising order."""
    size = config.draft_vocab_size
    ids = torch.arange(size) if draft_ids is None else draft_ids.cpu()
    if draft_ids is not None and not _are_rising(ids, size, config.vocab_size):
        raise ValueError(f"DraftHead: expected {size} rising ids below {config.vocab_size}, found {ids}")
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(size), t2d


def _are_rising(ids: Tensor, size: int, vocab_size: int) -> bool:
    if ids.shape != (size,) or bool((ids[1:] <= ids[:-1]).any()):
        return False
    return bool(ids[0] >= 0) and bool(ids[-1] < vocab_size)
