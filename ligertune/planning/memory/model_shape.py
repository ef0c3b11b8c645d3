"""Model sizes and facts that plans and reports need: parameters, layer widths, FLOPs per token, what is read.

`models.shape.read_shape` reads them from a built model. This module has no torch, so that a plan is plain data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ligertune.planning.memory.mixer_shapes import MixerShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class ParameterKind:
    """A shape of parameters with equal memory cost."""

    shape: tuple[int, ...]
    trains: bool
    inside: bool  # in a layer: neither the embedding nor the output head
    linear: bool  # the weight of a linear layer
    adapter: bool
    experts: bool = False  # the 3-D weight of a mixture's experts
    stored_size: float = 0.0  # bytes per element of a weight that stays as its checkpoint stores it; 0: of no such one
    unpacked_size: int = 0  # bytes per element that its dequantisation needs besides the weight

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def quantised(self, method: str) -> bool:
        """Whether QLoRA stores it in four bits."""
        return method == "qlora" and (self.linear or self.experts) and self.inside and not self.adapter

    def in_eight_bits(self, stored_as: str | None) -> bool:
        """Whether method.load_in_8bit stores it in eight bits, with a float32 scale for each row. Experts stay."""
        return stored_as == "int8" and self.linear and self.inside and not self.adapter

    def itemsize(self, weight_dtype: str) -> float:
        """Bytes per element, unless the method quantises it. Adapters are always float32."""
        if self.stored_size:
            return self.stored_size
        return 4 if self.adapter else DTYPE_BYTES[weight_dtype]


@dataclass(frozen=True)
class ExpertsShape:
    """The experts of one layer and their router. Every number of tokens per expert needs the same memory."""

    number: int  # X
    chosen: int  # K
    mlp: int  # F of one expert
    shared: int = 0  # width of the shared experts, which see every token
    parameters: int = 0  # of all X experts
    trained: int = 0  # of these, how many train
    adapter: int = 0  # parameters of LoRA on the experts' weights
    lora: int = 0  # LoRA rank times adapted projections
    router: int = 0  # bytes per token that the router saves besides its input
    activation: int = 0  # elements per row that transformers' activation code saves besides z and its output
    gates_shared: bool = False  # the shared experts' output is multiplied by a gate of the token

    @property
    def reads_input(self) -> bool:
        """Whether the backward needs the experts' input: their weights or adapters train."""
        return self.trained > 0 or self.lora > 0


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer. Sizes are elements per token; the flags name the linear inputs saved for the backward.

    query, key and heads are 0 in a layer without attention, as most with a mixer are; mlp in one without an MLP.
    """

    hidden: int  # E
    query: int  # H * D
    key: int  # K * D
    heads: int  # H
    mlp: int  # F; for a mixture of experts, of the experts that a token uses
    norms: int  # inputs of all norms
    attn_in: bool = True
    mlp_in: bool = True
    mlp_out: bool = True
    adapters: int = 0  # LoRA rank times adapted linear layers
    adapter_inputs: int = 0  # sum of the input widths of these layers
    widest_adapter: int = 0  # the largest of them
    adapter_outputs: int = 0  # sum of the output widths
    adapter_elements: int = 0  # of their matrices
    experts: ExpertsShape | None = None  # of a mixture of experts
    norms_train: bool = True  # whether a norm's weight (or a bias) trains
    normed: bool = True  # attention and MLP read the output of a norm (OLMo 2 norms their outputs instead)
    mixer: MixerShape | None = None
    mixer_out: bool = True
    attn_out: bool = True
    gated: bool = False  # attention's output is multiplied by a gate, the other half of q_proj's output
    # of an MLP without a gate: elements of its width that its activation saves, and whether its output is among them
    ungated: tuple[int, bool] | None = None

    @property
    def dense_mlp(self) -> int:
        """Width of the MLP that each token goes through: the shared experts' in a mixture, which may have none."""
        return self.mlp if self.experts is None else self.experts.shared

    @property
    def saved_by_mlp(self) -> int:
        """Elements per token that the dense MLP saves besides its input, by our kernels if it has a gate."""
        saved, with_output = (2, False) if self.ungated is None else self.ungated
        return self.dense_mlp * (saved + (self.mlp_out and not with_output))

    @property
    def gated_out(self) -> int:
        """The saved input of the output projection if it is a product with a gate, not what attention saves anyway."""
        mixed = 0 if self.mixer is None else self.mixer.values
        return self.query * self.gated * self.attn_out + mixed * self.mixer_out


@dataclass(frozen=True)
class HeadShape:
    """The output head and the embedding, (V, E) each; `tied`: one shared weight.

    token_rows: some rows of the frozen head train, for which the loss reads a copy of it and makes its whole gradient.
    """

    vocab: int
    hidden: int
    head_trains: bool = True
    embedding_trains: bool = True
    tied: bool = False
    gives_scores: bool = False  # a score head of a few outputs instead, which reads one token of each text
    token_rows: bool = False

    @property
    def elements(self) -> int:
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """Number of (V, E) weights."""
        return 1 if self.tied or self.gives_scores else 2

    @property
    def trained_weights(self) -> int:
        """Number of (V, E) gradients. A tied weight has one."""
        if self.tied:
            return int(self.head_trains or self.embedding_trains)
        return self.head_trains + self.embedding_trains


@dataclass(frozen=True)
class TowerShape:
    """The tower that reads files: layers, and elements per patch that one layer saves for the backward."""

    layers: int
    hidden: int
    kept: int
    patches_per_token: float
    trains: bool
    projector: int = 0  # elements per token that the projector saves; it is never checkpointed


class AddedLayerBytes(NamedTuple):
    """Bytes of a micro-batch that layers next to a frozen model need. held: from their forward to their backward."""

    captured: int  # states of the model, while it runs
    held: int
    loss: int  # besides, while the loss is computed
    backward: int  # besides, in the backward


@dataclass(frozen=True)
class AddedHeadsShape:
    """Heads that a feature adds on top of the model: their number and residual blocks.

    joint: the model trains with them; otherwise it is frozen.
    """

    number: int
    blocks: int
    joint: bool
    own_projection: bool  # each head has its own (V, E) output weight

    @property
    def needs_fused_loss(self) -> bool:
        """Whether memory is predicted only where a kernel computes the loss."""
        return True

    @property
    def predicts_shards(self) -> bool:
        """Whether memory is predicted where several ranks share the model."""
        return False

    def layer_bytes(self, tokens: int, labels: int, itemsize: int) -> AddedLayerBytes | None:
        """Return what a feature's own layers need for these tokens, of which `labels` count; None: residual blocks."""
        return None


@dataclass(frozen=True)
class FrozenModelShape:
    """A model that only runs forward next to the trained one: a teacher, or a reference. Each device holds all of it.

    gives_hidden_states: the loss reads its last hidden states, which exist until the loss is computed.
    """

    weights: int  # bytes on the device
    hidden: int  # E
    widest: int  # elements per token at the widest point of a layer
    itemsize: int
    gives_hidden_states: bool = False
    in_host_memory: int = 0  # bytes of layers that are copied to the device one at a time

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.hidden * self.itemsize


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model. `n_parameters` counts tied weights once.

    `layer` and `head` are None for a model whose layers are not understood; then no memory is predicted.
    """

    family: str
    n_parameters: int
    n_trainable: int
    n_matmul: int  # parameters that multiply each token: 2-D weights without the embedding, and always the head
    n_matmul_trainable: int
    hidden_size: int
    num_hidden_layers: int
    attention_width: int  # H * D
    vocab_size: int
    context: int | None  # max_position_embeddings
    parameters: tuple[tuple[ParameterKind, int], ...] = ()  # (kind, number of parameters of that kind)
    layer: LayerShape | None = None
    head: HeadShape | None = None
    tower: TowerShape | None = None
    in_front: int = 0  # first layers without a backward: nothing in or before them trains
    n_matmul_in_front: int = 0  # part of n_matmul in those layers
    n_active: int | None = None  # parameters that one token uses, of a mixture of experts; None: all
    other_layers: tuple[tuple[LayerShape, int], ...] = ()  # with a backward, unlike `layer`; how many
    heads: AddedHeadsShape | None = None
    linear_layers: int = 0  # layers without attention
    linear_in_front: int = 0  # of those, how many are among the `in_front`
    mixers: int = 0  # layers with a mixer; some also have attention
    mixers_in_front: int = 0

    @property
    def mixer(self) -> MixerShape | None:
        """That of the layers that have one."""
        layers = (self.layer, *(layer for layer, _ in self.other_layers))
        return next((layer.mixer for layer in layers if layer is not None and layer.mixer is not None), None)

    def predicts_heads(self, shards: int, fused_loss: bool) -> bool:
        """Return whether the memory of added heads is predicted, if there are any. fused_loss: a kernel computes it."""
        if self.heads is None:
            return True
        return (shards == 1 or self.heads.predicts_shards) and (fused_loss or not self.heads.needs_fused_loss)

    @property
    def recurrence(self) -> int:
        """FLOPs per token forward of the recurrence of a layer with a mixer; 0: it is not understood."""
        return 0 if self.mixer is None else self.mixer.flops

    def flops(self, *, tokens: int, squared_lengths: int) -> float:
        """Return model FLOPs of forward and backward, without recomputation.

        tokens: sum of document lengths. squared_lengths: sum of squared document lengths.

        A weight costs 2 FLOPs per token forward, 2 for its input's gradient and, if it trains, 2 for its own gradient
        (Kaplan et al. 2020, section 2.1). Causal attention costs 2 * T^2 * H * D per layer forward (two products, half
        of the square) and twice that backward. Frozen first layers have no backward.

        A gated delta rule (Yang, Kautz and Hatamizadeh, arXiv:2412.06464) multiplies the state (K, V) of
        each of its X heads by k and by q, and adds k v^T: 6 * X * K * V per token forward, and twice that backward;
        Mamba 2 multiplies it by C and adds x B^T. They are counted token by token, without the products that chunks
        add. Their convolution costs 2 per tap and channel, and is among the weights.
        """
        weights = (4 * self.n_matmul - 2 * self.n_matmul_in_front + 2 * self.n_matmul_trainable) * tokens
        linear_passes = 3 * self.linear_layers - 2 * self.linear_in_front
        attention_passes = 3 * self.num_hidden_layers - 2 * self.in_front - linear_passes
        attention = 2 * attention_passes * self.attention_width * squared_lengths
        mixer_passes = 3 * self.mixers - 2 * self.mixers_in_front
        return float(weights + attention + mixer_passes * self.recurrence * tokens)


@dataclass(frozen=True)
class ModalityFacts:
    """What planning knows of the files that a model reads besides text. The defaults are those of a text model."""

    inputs: str = ""  # plural noun for messages, such as images
    model_kind: str = "language model"  # for messages
    family: str | None = None  # None: the model reads text only
    packs_exactly: bool = True  # packed rows compute exactly what single rows do

    @property
    def reads_text_only(self) -> bool:
        return self.family is None
