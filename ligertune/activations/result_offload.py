"""The output projections of attention and mixers whose results a checkpointed layer keeps (`second_run`).

The residual stream between attention and MLP is the layer's input plus that result. So the second run needs neither
attention's forward nor this product, but for the inputs that their backward reads.
"""

from __future__ import annotations

from ligertune_kernels.autograd import autocast_dtype
from ligertune_kernels.known_results import known_results
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ligertune.activations.second_run import KnownProduct
from ligertune.patching.lora.joint_lora import keep_result
from ligertune.patching.module_patch import patch_module, unpatch_module
from ligertune.patching.recompute import LinearPatch, RecomputingLinear, is_linear, is_whole

NAMES = ("o_proj", "out_proj")


class KeptProjection(LinearPatch):
    """Mixin of a plain output projection."""

    def forward(self, input: Tensor) -> Tensor:
        layer = known_results()
        dtype = autocast_dtype(input.device) or input.dtype
        # Where autocast casts a factor, its gradient would have another dtype than the product's.
        if layer is None or not dtype == input.dtype == self.weight.dtype or not is_whole(self.weight):
            return super().forward(input)
        return KnownProduct.apply(input, self.weight, self.bias, lambda compute: layer.result(lambda: (compute(),))[0])


def keep_projections(model: nn.Module) -> None:
    """Let the output projections of the checkpointed layers of `model`, adapted or not, keep their results.

    They no longer recompute their inputs: in a checkpointed layer nothing is recomputed by itself.
    """
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer) or not getattr(layer, "gradient_checkpointing", False):
            continue
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] not in NAMES:
                continue
            if hasattr(module, "base_layer"):
                keep_result(module)
            elif is_linear(module) and "forward" not in vars(module):
                if isinstance(module, RecomputingLinear):  # a module takes one patch
                    unpatch_module(module)
                patch_module(module, KeptProjection)
