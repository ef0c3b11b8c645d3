"""A name for layers of transformers, whose attributes no type declares.

`torch.nn.Module` declares each unknown attribute as `Tensor | Module`. Code that recognised a layer reads its numbers,
flags and weights by name, so such a layer is an `AnyModule`; a module that is only called, moved or iterated over stays
a `torch.nn.Module`.
"""

from typing import Any, TypeAlias

AnyModule: TypeAlias = Any
