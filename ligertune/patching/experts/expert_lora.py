"""LoRA of parameters in split form: x W + s (x Aᵀ) Bᵀ by grouped products, without the sum W + s B A.

PEFT wraps an experts module in one `ParamWrapper` per adapted weight, and each of them adds its update to the weight
in every forward: for Qwen3-30B-A3B that writes 1.2 GB per layer. Here the outermost wrapper passes A and B to the
experts instead. The same holds for the weight of a linear layer that is targeted as a parameter.

PEFT stores A of all experts as (X·R, inputs), expert-slowest, and B as (outputs, R·X), expert-fastest.

PEFT's own code runs where the layer is something else, and for several active adapters; adapters that are switched off
or merged add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from ligertune_kernels.ops.moe.expert_passes import ExpertLora
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from ligertune.any_types import AnyModule
from ligertune.patching.experts.kernel_experts import KernelExperts, weights_of
from ligertune.patching.module_patch import ModulePatch, patch_module
from ligertune.patching.probe import Refusal

ARGUMENTS = {"gate_up_proj": "gate_up_lora", "down_proj": "down_lora"}  # parameter -> argument of the layer


class SplitLora(ModulePatch):
    """Mixin of PEFT's outermost wrapper of a module's parameters."""

    get_base_layer: Callable[[], AnyModule]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.get_base_layer()
        if kwargs or why_not_split(self) is not None:
            return super().forward(x, *args, **kwargs)
        if isinstance(base, nn.Linear):
            return _add_low_rank(base(x), x, self)
        return base(x, *args, **expert_adapters(self, transposed=base.patch_spec.layout.transposed))


Wrapper = AnyModule  # a ParamWrapper, also one with the mixin


def why_not_split(outer: Wrapper) -> str | None:
    """Return why PEFT's own code has to run, or None if the update can be added to the layer's products."""
    base = outer.get_base_layer()
    names = [wrapper.parameter_name for wrapper in _wrappers(outer)]
    if isinstance(base, nn.Linear):
        if names != ["weight"]:
            return "more than the weight of the layer is adapted"
    elif not isinstance(base, KernelExperts):
        return f"{type(base).__name__} is not patched"
    elif isinstance(weights := weights_of(base), Refusal):
        return weights.reason
    elif set(names) - set(ARGUMENTS):
        return f"{', '.join(sorted(set(names) - set(ARGUMENTS)))} is adapted"
    for wrapper in _wrappers(outer):
        if wrapper.disable_adapters and wrapper.merged:  # PEFT takes the merged update out again
            return "the adapter is merged and switched off"
        if len(_active(wrapper)) > 1:
            return "several adapters are active"
    return None


def expert_adapters(outer: Wrapper, *, transposed: bool) -> dict[str, ExpertLora]:
    """Return the arguments gate_up_lora and down_lora of the layer, as views of the adapter's weights.

    transposed: as of `ExpertLayout`.
    """
    return {
        ARGUMENTS[wrapper.parameter_name]: expert_lora(wrapper, name, transposed=transposed)
        for wrapper in _wrappers(outer)
        for name in _active(wrapper)
    }


def expert_lora(wrapper: Wrapper, name: str, *, transposed: bool) -> ExpertLora:
    """Return the adapter `name` of one weight of all experts, as views of its parameters."""
    a = wrapper.lora_A[name].weight
    b = wrapper.lora_B[name].weight
    n_experts = wrapper.num_experts
    a = a.view(n_experts, -1, a.shape[1])  # (X, R, inputs)
    b = b.view(len(b), -1, n_experts).permute(2, 0, 1)  # (X, outputs, R)
    if getattr(wrapper.get_base_layer(), "is_transposed", False) != transposed:
        # Without this attribute (Llama 4) PEFT takes the outputs of transposed weights for their inputs.
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return ExpertLora(a, b, wrapper.scaling[name])


def split_adapters(model: nn.Module) -> int:
    """Let every wrapper of parameters in `model` add its update in split form; return their number.

    Each forward decides again whether it can (`why_not_split`), so `patch` may come before or after.
    """
    inner = {id(module.base_layer) for module in model.modules() if isinstance(module, ParamWrapper)}
    outer = [m for m in model.modules() if isinstance(m, ParamWrapper) and id(m) not in inner]
    for module in outer:
        if not isinstance(module, SplitLora):
            patch_module(module, SplitLora)
    return len(outer)


@torch.no_grad()
def merge_parameters(model: nn.Module) -> None:
    """Add the active adapters of all wrapped parameters to them, in float32 and rounded once to the weight's dtype.

    PEFT's `merge` rounds the update first, then the sum.
    """
    wrappers: list[Wrapper] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    for wrapper in wrappers:
        parameter = wrapper.get_param()
        base_transposed = getattr(wrapper.get_base_layer(), "is_transposed", False)
        for name in _active(wrapper):
            a, b, scale = expert_lora(wrapper, name, transposed=base_transposed)
            for weight, one_a, one_b in zip(parameter.data.view(len(a), *parameter.shape[-2:]), a, b, strict=True):
                update = scale * (one_b.float() @ one_a.float())
                weight.copy_(weight.float() + (update.T if base_transposed else update))
            wrapper.merged_adapters.append(name)


def _wrappers(outer: Wrapper) -> Iterator[Wrapper]:
    """Yield the wrapper and those nested in it."""
    while isinstance(outer, ParamWrapper):
        yield outer
        outer = outer.base_layer


def _active(wrapper: Wrapper) -> list[str]:
    """Return the adapters that add to the weight: none if they are switched off or merged."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _add_low_rank(y: Tensor, x: Tensor, wrapper: Wrapper) -> Tensor:
    """Return y + s (x Aᵀ) Bᵀ."""
    for name in _active(wrapper):
        a, b = (part[name].weight.to(x.dtype) for part in (wrapper.lora_A, wrapper.lora_B))
        y = y + wrapper.scaling[name] * F.linear(F.linear(x, a), b)
    return y
