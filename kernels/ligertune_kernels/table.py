"""The ops, one row each. The package's public names are read from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One op: a file of `ops/` that holds `<name>`, `<name>_reference` and the modules."""

    name: str
    file: str
    summary: str
    modules: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()  # the arguments that receive a gradient

    @property
    def module(self) -> str:
        return f"ligertune_kernels.ops.{self.file}"

    @property
    def reference(self) -> str:
        return f"{self.name}_reference"

    @property
    def exports(self) -> tuple[str, ...]:
        return (self.name, self.reference, *self.modules)


OPS = (
    Op("rms_norm", "norms.rms_norm", "root-mean-square norm, three casting orders", ("RMSNorm",), ("x", "weight")),
    Op(
        "add_rms_norm",
        "norms.add_rms_norm",
        "residual addition and the RMS norm of the sum",
        ("AddRMSNorm",),
        ("x", "residual", "weight"),
    ),
    Op("layer_norm", "norms.layer_norm", "layer norm of the last dimension", ("LayerNorm",), ("x", "weight", "bias")),
    Op("group_norm", "norms.group_norm", "norm of groups of channels", ("GroupNorm",), ("x", "weight", "bias")),
    Op("apply_rope", "attention.rope", "rotary embedding of queries and keys in one launch", (), ("q", "k")),
    Op(
        "document_attention",
        "attention.document_attention",
        "causal attention in a row of documents, none of which sees another",
        (),
        ("query", "key", "value"),
    ),
    Op("swiglu", "mlp.swiglu", "silu(gate) * up, split or packed", ("SwiGLU",), ("gate", "up")),
    Op("geglu", "mlp.geglu", "gelu(gate) * up, split or packed, tanh or erf", ("GeGLU",), ("gate", "up")),
    Op("cross_entropy", "losses.cross_entropy", "cross entropy of logits", ("CrossEntropyLoss",), ("logits",)),
    Op(
        "linear_cross_entropy",
        "losses.linear_cross_entropy",
        "cross entropy of a linear layer's output, without the logits",
        ("LinearCrossEntropyLoss",),
        ("hidden", "weight", "bias"),
    ),
    Op(
        "multi_head_linear_cross_entropy",
        "losses.multi_head_linear_cross_entropy",
        "cross entropies of several heads over the same tokens, without their logits",
        ("MultiHeadLoss",),
        ("hiddens", "weight"),
    ),
    Op(
        "linear_token_statistics",
        "losses.linear_token_statistics",
        "log-probability, likeliest class and entropy of each token, without the logits",
        ("TokenStatistics",),
    ),
    Op(
        "kl_div",
        "distill.kl_div",
        "Kullback-Leibler divergence of log-probabilities",
        ("KLDivLoss",),
        ("input", "target"),
    ),
    Op("jsd", "distill.jsd", "generalised Jensen-Shannon divergence of log-probabilities", ("JSDLoss",), ("input",)),
    Op(
        "linear_jsd",
        "distill.linear_jsd",
        "generalised JSD of a student's linear layer from a teacher's, without the logits",
        ("LinearJSDLoss",),
        ("student_hidden", "student_weight"),
    ),
    Op(
        "int2_int8_matmul",
        "extra.int2_int8_matmul",
        "product of int8 activations and packed 2-bit weights",
        ("pack_int2", "unpack_int2"),
    ),
    Op("adamw_step", "extra.adamw_step", "AdamW's step in place, clipping included"),
    Op("embedding", "extra.embedding", "rows of a table, with a deterministic gradient", ("Embedding",), ("weight",)),
)
