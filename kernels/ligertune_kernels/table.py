"""Table of ops, one row each: file, modules, differentiable arguments. Public names are read from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One op: a file of `ops/` that defines `<name>`, `<name>_reference` and the modules."""

    folder: str
    name: str
    modules: tuple[str, ...] = ()  # nn.Modules and further functions
    inputs: tuple[str, ...] = ()  # arguments that receive a gradient
    file: str = ""  # if not the name

    @property
    def module(self) -> str:
        return f"{__package__}.ops.{self.folder}.{self.file or self.name}"

    @property
    def exports(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_reference", *self.modules)


OPS = (
    Op("norms", "rms_norm", ("RMSNorm",), ("x", "weight")),
    Op("norms", "add_rms_norm", ("AddRMSNorm",), ("x", "residual", "weight"), file="rms_norm"),
    Op("norms", "gated_rms_norm", ("GatedRMSNorm",), ("x", "gate", "weight")),
    Op("norms", "layer_norm", ("LayerNorm",), ("x", "weight", "bias")),
    Op("norms", "group_norm", ("GroupNorm",), ("x", "weight", "bias")),
    Op("attention", "apply_rope", (), ("q", "k"), file="rope"),
    Op(
        "attention",
        "document_attention",
        ("Documents", "document_attention_memory", "document_attention_with_lse"),
        ("query", "key", "value"),
    ),
    Op("attention", "merge_own_keys", (), ("query", "out", "lse", "keys", "values"), file="own_keys"),
    Op("attention", "decode_attention"),
    Op("recurrence", "causal_conv1d", (), ("x", "weight", "bias")),
    Op("recurrence", "causal_conv1d_step", file="decode"),
    Op("recurrence", "gated_delta_rule_step", file="decode"),
    Op("recurrence", "gated_delta_rule", ("gated_delta_rule_with_states",), ("query", "key", "value", "decay", "beta")),
    Op("recurrence.ssd", "ssd", ("ssd_with_states",), ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"), file="op"),
    Op("recurrence.ssd", "ssd_step", file="ssd_decode"),
    Op("recurrence.kda", "kda", ("kda_with_states",), ("query", "key", "value", "decay", "beta"), file="op"),
    Op("recurrence.kda", "kda_step"),
    Op("mlp", "swiglu", ("SwiGLU",), ("gate", "up"), file="gated_mlp"),
    Op("mlp", "geglu", ("GeGLU",), ("gate", "up"), file="gated_mlp"),
    Op("mlp", "reglu", ("ReGLU",), ("gate", "up"), file="gated_mlp"),
    Op(
        "moe",
        "experts",
        ("ExpertLayout", "ExpertLora", "ExpertProjection", "GatedActivation"),
        ("hidden", "expert_weights", "gate_up", "down"),
    ),
    Op("losses", "cross_entropy", ("CrossEntropyLoss",), ("logits",)),
    Op("losses", "linear_cross_entropy", ("LinearCrossEntropyLoss", "LinearLora"), ("hidden", "weight", "bias")),
    Op("losses", "multi_head_linear_cross_entropy", ("MultiHeadLoss",), ("hiddens", "weight")),
    Op("losses", "linear_log_probs", ("TokenLogProbs", "log_probs_memory"), ("hidden", "weight", "bias")),
    Op("losses", "linear_token_statistics", ("TokenStatistics",), file="linear_log_probs"),
    Op("distill", "kl_div", ("KLDivLoss",), ("input", "target")),
    Op("distill", "jsd", ("JSDLoss",), ("input",)),
    # no gradient for the teacher
    Op("distill", "linear_jsd", ("LinearJSDLoss", "divergence_workspace"), ("student_hidden", "student_weight")),
    Op("moe", "dequantize_nf4", ("quantize_nf4", "nf4_bytes", "Nf4")),
    Op("block_scaled", "dequantize_mxfp4", ("quantize_mxfp4", "Mxfp4")),
    Op("block_scaled", "dequantize_float8_blocks", ("quantize_float8_blocks", "Float8Blocks")),
    Op("float8", "quantize_float8", ("Float8Copies",)),
    Op("float8", "swiglu_float8", ("swiglu_float8_backward", "SwigluFloat8Gradients")),
    Op("extra", "int2_int8_matmul", ("pack_int2", "unpack_int2")),
    Op("extra", "adamw_step", ("AdamWOptions",)),
    Op("extra", "seeded_dropout", ("draw_seed",)),
    Op("extra", "sample_tokens"),
    Op("extra", "embedding", ("Embedding",), ("weight",)),
)
