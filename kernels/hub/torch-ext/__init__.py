"""ligertune's Triton kernels for training, as a package of Hugging Face's `kernels`: every op, layers and attention.

On a CPU every op runs its PyTorch reference.
"""

from importlib import import_module

from . import layers
from .experts_forward import experts_forward
from .flash_attention import flash_attn_func, flash_attn_varlen_func
from .table import OPS

for _op in OPS:
    globals().update({_name: getattr(import_module(_op.module), _name) for _name in _op.exports})

__all__ = [
    "experts_forward",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "layers",
    *(name for op in OPS for name in op.exports),
]
