"""The model as it will be, built without memory: its sizes, and what our kernels make of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ligertune.decode.medusa_run import preview_heads
from ligertune.planning.options import BuildOptions
from ligertune.planning.plan import KernelLine

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

    from ligertune.attention.choice import AttentionChoice
    from ligertune.patching.patch import PatchReport


def preview_model(options: BuildOptions, config: PreTrainedConfig, device: str, attention: AttentionChoice) -> tuple:
    """(shape, attention, kernels' backend, kernel lines) of the model as it will be, built without memory."""
    import torch
    from ligertune_kernels import backend

    import ligertune.attention.packed_documents  # noqa: F401  makes its attention known to transformers
    from ligertune.activations.gate_offload import check_gates, keep_gates
    from ligertune.models.float8 import float8_linears
    from ligertune.models.load import build_model
    from ligertune.models.shape import read_shape
    from ligertune.models.trainable import apply_method
    from ligertune.vision.freeze import prepare_vision

    attn = attention.implementation or options.model.attn_implementation
    spec = dataclasses.replace(options.model, init="random", attn_implementation=attn)
    model = build_model(spec, config, dtype=torch.bfloat16, device="meta", seed=0)
    report = apply_kernels(options, model)
    prepare_vision(model, options.vision)
    lines = () if report is None else tuple(KernelLine(r.kernel, r.applied, r.left, r.note) for r in report.rows)
    if options.execution.fp8:
        lines += (KernelLine("float8_linear", *float8_linears(model).counts()),)
    if options.execution.gradient_checkpointing in ("offload_gate", "offload_both"):
        check_gates(keep_gates(model), model.config.model_type, asked=options.execution.gradient_checkpointing)
    adapted = apply_method(model, options.method, fused=options.kernels.fuses_lora)
    if options.kernels.fuses_lora:
        lines += fused_adapters(adapted)
    shape = read_shape(adapted)
    if options.task == "medusa":
        shape, lines = preview_heads(options, adapted, lines)
    here = device if torch.cuda.is_available() else "cpu"  # a plan may be for a GPU that is not
    return shape, model.config._attn_implementation, backend(here), lines


def apply_kernels(options: BuildOptions, model: PreTrainedModel) -> PatchReport | None:
    """Patch as the recipe's `kernels` says; None where they are off."""
    from ligertune.patching.patch import patch

    wanted = options.kernels
    if wanted.enabled is False:
        return None
    loss = "torch" if options.task == "medusa" else wanted.loss  # the heads' loss is computed around the model
    switches = {"rope": wanted.rope, "norm": wanted.norm, "mlp": wanted.mlp}
    return patch(model, **switches, loss=loss, recompute=wanted.recompute)


def fused_adapters(model: PreTrainedModel | PeftModel) -> tuple[KernelLine, ...]:
    """The line of LoRA layers that add their term in their products, if there are any."""
    from ligertune.models.fused_lora import FusedLora

    fused = sum(isinstance(module, FusedLora) for module in model.modules())
    return (KernelLine("lora_linear", fused, 0, ""),) if fused else ()
