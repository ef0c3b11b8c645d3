"""transformers' `experts_implementation` by the op `experts`.

kernel = kernels.get_kernel("ligertune/ligertune-kernels", version=1, trust_remote_code=True)
ALL_EXPERTS_FUNCTIONS.register("ligertune", kernel.experts_forward)  # transformers.integrations.moe
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="ligertune")
"""

import torch
from torch import nn

from .activations import gate_of
from .ops.moe.experts import ExpertLayout, ExpertProjection, experts


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,  # (N, E)
    top_k_index: torch.Tensor,  # (N, K); an index of no expert adds nothing
    top_k_weights: torch.Tensor,  # (N, K)
) -> torch.Tensor:  # (N, E)
    """Return the weighted sum of the outputs of each token's experts.

    Raises ValueError for experts without a gate, with a norm behind them, or with a gate that the op does not compute.
    """
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{type(module).__name__} has no gate, or a norm behind each expert, which the op `experts` does not "
            "compute: write experts_implementation='grouped_mm'"
        )
    layout = ExpertLayout(getattr(module, "is_transposed", False), not getattr(module, "is_concatenated", True))
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if getattr(module, "has_bias", False) else (None, None)
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        ExpertProjection(module.gate_up_proj, biases[0]),
        ExpertProjection(module.down_proj, biases[1]),
        activation=gate_of(module),
        layout=layout,
    )
