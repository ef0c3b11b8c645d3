"""Sizes, memory and FLOPs of the mixers of hybrid models, by formula.

Our convolution and recurrences save their inputs: what the input projections give, the same convolved, and the decays
in float32. Gated norms save the recurrence's output and the gate. The backward of a recurrence computes again what it
needs of the forward; nothing of it is freed before the backward ends.

transformers' functions keep every step of a chunk of C tokens in float32, per token and head:

- gated delta rule: 12 K + 3 V + 5 C + 6 numbers, and K V / C for the states
- Mamba 2: 5 P + 5 N + 3 C + 6 numbers, and 2.25 N P / C for the states
- Kimi's delta attention: (3 C + 12) K + 3 V + 23.5 C numbers, and K V / C for the states

They were counted in functions of transformers 5.24: of Qwen3.5, Nemotron-H and Kimi-Linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

TORCH_CHUNK = 64  # tokens per chunk in transformers' delta rules
SSD_PART_HEADS = 16  # heads of a group whose gradients a program of ssd adds, in float32 where a group has more


class MixerShape(Protocol):
    """What a plan asks of a layer's mixer."""

    @property
    def channels(self) -> int:
        """Elements per token of the convolution."""

    @property
    def values(self) -> int:
        """Elements per token of the output, which the output projection reads."""

    @property
    def projected(self) -> int:
        """Elements per token of the input projections' outputs, but for numbers per head."""

    @property
    def flops(self) -> int:
        """FLOPs per token forward of the recurrence, token by token, without the products that chunks add."""

    def saved(self, itemsize: int, *, fused: bool, fused_norm: bool, trains: bool) -> int:
        """Return the bytes per token that are saved besides the inputs of the projections.

        fused: our kernels compute convolution and recurrence. trains: the decay does.
        """

    def in_backward(self, itemsize: int, *, chunk: int) -> int:
        """Return the bytes per token in the backward. chunk: tokens per chunk of our kernels; 0: not ours."""


@dataclass(frozen=True)
class DeltaRuleShape:
    """A gated delta rule."""

    key_heads: int  # H
    value_heads: int  # X
    key_dim: int  # K of one head
    value_dim: int  # V of one head
    repeats: bool = False  # the model repeats queries and keys for all value heads, as that of transformers 5.17 does

    @property
    def values(self) -> int:
        """As of MixerShape; the gate has as many."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """As of MixerShape: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def projected(self) -> int:
        """As of MixerShape."""
        return self.channels + self.values

    @property
    def flops(self) -> int:
        """As of MixerShape: three products of the state (K, V) of each value head."""
        return 6 * self.value_heads * self.key_dim * self.value_dim

    def saved(self, itemsize: int, *, fused: bool, fused_norm: bool, trains: bool) -> int:
        """As of MixerShape."""
        elements = 2 * self.channels + self.value_heads
        if fused and self.repeats:  # transformers' function converts them to float32, and keeps that
            elements += 2 * self.value_heads * self.key_dim
        # in float32 softplus's input, its output if it is multiplied by a decay that trains, and their product
        size = elements * itemsize + 4 * self.value_heads * (2 + trains)
        if not fused:
            per_head = 12 * self.key_dim + 3 * self.value_dim + 5 * TORCH_CHUNK + 6
            size += 4 * self.value_heads * (per_head + self.key_dim * self.value_dim // TORCH_CHUNK)
        return size + saved_by_gated_norm(self.values, self.value_heads, itemsize, fused=fused_norm, trains=trains)

    def in_backward(self, itemsize: int, *, chunk: int) -> int:
        """As of MixerShape. The gradients of the output and of the gate exist at the same time."""
        gradients = (self.channels + 2 * self.values) * itemsize
        if (
            not chunk
        ):  # gradients of what transformers' function saves, each with a copy that a slice of a chunk adds to
            return gradients + 8 * self.value_heads * (2 * self.key_dim + self.value_dim + TORCH_CHUNK)
        states = 2 * self.key_dim * self.value_dim // chunk
        per_head = 2 * self.value_dim + chunk + states
        # float32: a partial dk, lengths of q and k; sums of decays and their gradients, partial gradients of beta
        floats = self.key_heads * (self.key_dim + 2) + 8 * self.value_heads
        return gradients + self.value_heads * per_head * itemsize + 4 * floats


def saved_by_gated_norm(values: int, rows: int, itemsize: int, *, fused: bool, trains: bool) -> int:
    """Return the bytes per token of a gated norm's input and gate. rows: of the norm, for each token."""
    if fused:
        return 2 * values * itemsize + 4 * rows
    # in float32 the input, the gate and that activated; the normalised output before and after the weight
    return values * (3 * 4 + (1 + trains) * itemsize) + 4 * rows


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution between two gates, as of LFM2: one of its three projections convolves the product of two others."""

    width: int  # E

    @property
    def values(self) -> int:
        """As of MixerShape."""
        return self.width

    @property
    def channels(self) -> int:
        """As of MixerShape."""
        return self.width

    @property
    def projected(self) -> int:
        """As of MixerShape."""
        return 3 * self.width

    @property
    def flops(self) -> int:
        """As of MixerShape: none. The taps are among the weights."""
        return 0

    def saved(self, itemsize: int, *, fused: bool, fused_norm: bool, trains: bool) -> int:
        """As of MixerShape: the projections, their product, and what comes of it."""
        return 5 * self.width * itemsize

    def in_backward(self, itemsize: int, *, chunk: int) -> int:
        """As of MixerShape: the gradients of the three projections, apart and as one, of output and product."""
        return 8 * self.width * itemsize


@dataclass(frozen=True)
class Mamba2Shape:
    """A state space duality, Mamba 2."""

    heads: int  # H
    head_dim: int  # P
    groups: int  # G
    state_dim: int  # N
    torch_chunk: int  # tokens per chunk in transformers' function
    has_norm: bool = True  # its output goes through a gated norm; else it is multiplied by the activated gate
    own_input: int = 0  # elements of an input that only the mixer reads: Falcon-H1 scales it

    @property
    def values(self) -> int:
        """As of MixerShape; the gate has as many."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """As of MixerShape: x, B and C."""
        return self.values + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """As of MixerShape."""
        return self.channels + self.values

    @property
    def flops(self) -> int:
        """As of MixerShape: two products of the state (P, N) of each head."""
        return 4 * self.heads * self.head_dim * self.state_dim

    def saved(self, itemsize: int, *, fused: bool, fused_norm: bool, trains: bool) -> int:
        """As of MixerShape. What the one projection gives is saved as a whole, with the gate."""
        size = (self.own_input + self.projected + self.heads + self.channels) * itemsize
        if not fused:
            per_head = 5 * (self.head_dim + self.state_dim) + 3 * self.torch_chunk + 6
            states = 9 * self.head_dim * self.state_dim // (4 * self.torch_chunk)
            size += 4 * self.heads * (per_head + states)
        if not self.has_norm:
            return size + 2 * self.values * itemsize
        norm = saved_by_gated_norm(self.values, self.groups, itemsize, fused=fused_norm, trains=trains)
        return size + norm - self.values * itemsize

    def in_backward(self, itemsize: int, *, chunk: int) -> int:
        """As of MixerShape. Gradients of the projection exist in parts, then as a whole."""
        gradients = (2 * self.projected + self.values) * itemsize
        if not chunk:
            return gradients + 8 * self.heads * (self.head_dim + self.state_dim + self.torch_chunk)
        states = 2 * self.state_dim * self.head_dim // chunk
        shared = 2 * self.groups * chunk * itemsize
        many = self.heads > SSD_PART_HEADS * self.groups
        sums = 2 * 4 * many * self.state_dim * -(-self.heads // SSD_PART_HEADS)
        floats = 6 + 2 * self.state_dim // 64
        return gradients + self.heads * ((self.head_dim + states) * itemsize + 4 * floats) + shared + sums


@dataclass(frozen=True)
class ChannelDeltaShape:
    """A delta rule with a decay for each channel of the keys: Kimi's delta attention."""

    heads: int  # X, of keys and values
    key_dim: int  # K
    value_dim: int  # V

    @property
    def values(self) -> int:
        """As of MixerShape; the gate has as many."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Elements per token of the keys, and of the decays."""
        return self.heads * self.key_dim

    @property
    def channels(self) -> int:
        """As of MixerShape: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """As of MixerShape; with the decays."""
        return self.channels + self.values + self.keys

    @property
    def flops(self) -> int:
        """As of MixerShape: three products of the state (K, V) of each head."""
        return 6 * self.heads * self.key_dim * self.value_dim

    def saved(self, itemsize: int, *, fused: bool, fused_norm: bool, trains: bool) -> int:
        """As of MixerShape. The projections of decay and gate have an inner width of one head."""
        size = (2 * self.channels + self.heads + self.key_dim + self.value_dim) * itemsize
        # in float32 the steps of softplus, its output if it is multiplied by a decay that trains, the decay; and a mask
        size += self.keys * (4 * (3 + trains) + 1)
        if not fused:
            per_head = (3 * TORCH_CHUNK + 12) * self.key_dim + 3 * self.value_dim + 47 * TORCH_CHUNK // 2
            size += 4 * self.heads * (per_head + self.key_dim * self.value_dim // TORCH_CHUNK)
        return size + saved_by_gated_norm(self.values, self.heads, itemsize, fused=fused_norm, trains=trains)

    def in_backward(self, itemsize: int, *, chunk: int) -> int:
        """As of MixerShape."""
        gradients = (self.channels + 2 * self.values) * itemsize + 4 * self.keys
        if not chunk:
            return gradients + 8 * self.heads * (TORCH_CHUNK + 3) * self.key_dim
        states = 2 * self.key_dim * self.value_dim // chunk
        per_head = 3 * self.key_dim + 2 * self.value_dim + 4 * chunk + states
        return gradients + self.heads * (per_head * itemsize + 4 * 2 * self.key_dim)
