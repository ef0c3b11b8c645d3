"""ligertune's Triton kernels for training, as a package of Hugging Face's `kernels`: every op, layers and attention.

On a CPU every op runs its PyTorch reference.
"""

from importlib import import_module

from . import layers
from .experts_forward import experts_forward
from .flash_attention import flash_attn_func, flash_attn_varlen_func
from .ops.recurrence.kda.kda_functions import chunk_kda, fused_recurrent_kda
from .ops.recurrence.package_functions import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from .ops.recurrence.ssd.mamba_functions import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    selective_state_update,
)
from .table import OPS

for _op in OPS:
    globals().update({_name: getattr(import_module(_op.module), _name) for _name in _op.exports})

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "experts_forward",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "layers",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "selective_state_update",
    *(name for op in OPS for name in op.exports),
]
