"""Lines of a plan on adapters: LoRA layers that `kernels.lora` fuses, and experts with LoRA in split form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from ligertune.patching.experts.expert_lora import SplitLora, why_not_split
from ligertune.patching.lora.fused_lora import FusedLora, why_peft_computes
from ligertune.patching.mlps.recognise_mlps import gate_of
from ligertune.planning.plan import KernelLine


def adapter_lines(model: nn.Module) -> tuple[KernelLine, ...]:
    """Return the lines of a model's fused LoRA layers and of its experts with LoRA in split form, if any."""
    linear = [why_peft_computes(module) for module in model.modules() if isinstance(module, FusedLora)]
    experts = [why_not_split(module) for module in model.modules() if isinstance(module, SplitLora)]
    lines = {"lora_linear": linear, "expert_lora": experts}
    return tuple(_line_of(kernel, reasons) for kernel, reasons in lines.items() if reasons)


def fuses_gates(model: nn.Module) -> bool:
    """Return whether our functions compute the gate of an MLP together with its adapter."""
    gates = (gate_of(module) for module in model.modules())
    return any(isinstance(gate, FusedLora) and why_peft_computes(gate) is None for gate in gates)


def _line_of(kernel: str, reasons: Sequence[str | None]) -> KernelLine:
    """Return the line of a kernel. reasons: why it leaves a layer out, or None, for each layer."""
    left = Counter(reason for reason in reasons if reason is not None)
    notes = "; ".join(f"{count} {reason}" for reason, count in left.items())
    return KernelLine(kernel, len(reasons) - left.total(), left.total(), notes)
