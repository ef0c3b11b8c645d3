"""QuantisedWeight: a frozen weight that is stored in a few bits, with the dtype to which it is dequantised.

Formats (`Stored`): NF4 and FP4, MXFP4, float8 in blocks. A weight is that of X experts (X, rows, columns), or of one
expert or linear layer (rows, columns).

Its shape, dtype and device are those of the weight, so that transformers, PEFT and `patch` read it as they read any
weight. `weight[expert]` and transposes stay quantised, and so do the weights that autograd saves for the backward:
every other op receives the dequantised weight, which is dropped after it. Ops that write to it raise RuntimeError.

`weight.dequantize()` keeps the two weights of experts that it returned last (gate_up and down of one layer): a
checkpointed layer dequantises once for its second forward and its backward together.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

from ligertune_kernels.ops.block_scaled.dequantize_float8_blocks import Float8Blocks
from ligertune_kernels.ops.block_scaled.dequantize_mxfp4 import Mxfp4
from ligertune_kernels.ops.moe.dequantize_nf4 import Nf4, quantize_nf4
from ligertune_kernels.ops.moe.experts import Weight

# Each format has `tensors` (X, ...), the bytes of the weight first; their `names`; its other fields as `constants`; and
# `apply`, `dequantize`, `write` and `magnitudes`.
Stored: TypeAlias = Nf4 | Mxfp4 | Float8Blocks

KEPT_WEIGHTS = 2  # gate_up and down of one layer


class QuantisedWeight(torch.Tensor):
    """A weight in a few bits. stored: its bytes; transposed: the last two dimensions are swapped."""

    stored: Stored
    transposed: bool

    @staticmethod
    def __new__(
        cls, stored: Stored, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool = False
    ) -> QuantisedWeight:
        """shape: as this tensor shows it, (X, rows, columns), or (rows, columns) of one expert."""
        unswapped = _swapped(shape) if transposed else tuple(shape)
        strides = torch.empty(unswapped, device="meta").stride()
        strides = _swapped(strides) if transposed else strides
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=stored.tensors[0].device, requires_grad=False
        )
        made.stored = stored
        made.transposed = transposed
        return made

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its dtype. Read it only: the next call may return the same tensor."""
        shape = _swapped(self.shape) if self.transposed else tuple(self.shape)
        read = _recent if self.ndim == 3 else _computed
        whole = read(self.stored, shape, self.dtype)
        return whole.transpose(-2, -1) if self.transposed else whole

    def magnitudes(self) -> torch.Tensor:
        """Return the scales of the blocks; NaN or infinity where a weight is no number."""
        return self.stored.magnitudes()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(part.numel() * part.itemsize for part in self.stored.tensors)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        stored = self.stored
        for name, tensor in zip(stored.names, stored.tensors, strict=True):
            setattr(self, name, tensor)
        return list(stored.names), (self.dtype, self.transposed, type(stored), stored.constants)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], meta: Any, shape: Any, stride: Any
    ) -> QuantisedWeight:
        dtype, transposed, kind, constants = meta
        stored = kind(*(parts[name] for name in kind._fields if name in parts), *constants)
        return cls(stored, shape, dtype, transposed=transposed)

    def _stable_hash_for_caching(self) -> str:
        """Return what a compiled graph depends on. torch.compile asks tensor subclasses for it."""
        dtypes = [part.dtype for part in self.stored.tensors]
        stored = f"{type(self.stored).__name__} {self.stored.constants} {dtypes}"
        return f"{tuple(self.shape)} {self.dtype} {self.device} {self.transposed} {stored}"

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"QuantisedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _rebuilt, (
            self.stored,
            tuple(self.shape),
            self.dtype,
            self.transposed,
            isinstance(self, torch.nn.Parameter),
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _STAYS_PACKED:
            kept = _STAYS_PACKED[func](*args, **kwargs)
            if kept is not None:
                return kept
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise RuntimeError(f"{func}: a QuantisedWeight is frozen. Dequantise it, and write to the copy.")
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))


def to_nf4(
    weight: torch.Tensor,  # (X, rows, columns)
    device: torch.device | None = None,
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> QuantisedWeight:
    """Quantise a weight. Its experts go to `device` one by one, so that there is only one in full precision there.

    quant_type, double_quant: as of `quantize_nf4`. Raises ValueError for a weight that is not in floating point or has
    not three dimensions.
    """
    if weight.ndim != 3:
        raise ValueError(f"to_nf4: weight has shape {tuple(weight.shape)}: expected (experts, rows, columns)")
    experts = []
    for expert in weight.detach():
        single = expert.unsqueeze(0).to(device or weight.device)
        experts.append(quantize_nf4(single, quant_type=quant_type, double_quant=double_quant))
    tensors = zip(*(one.tensors for one in experts), strict=True)
    nf4 = Nf4(*(torch.cat(parts) for parts in tensors), quant_type)
    return QuantisedWeight(nf4, tuple(weight.shape), weight.dtype)


def versions_of(stored: Stored) -> tuple[int, ...]:
    """Return how often torch has written each part in place, as loading a state dict does."""
    return tuple(0 if part.is_inference() else part._version for part in stored.tensors)


def as_weight(weight: torch.Tensor) -> Weight:
    """Return what `experts` takes: a function for a quantised weight, anything else as it is."""
    return weight.dequantize if isinstance(weight, QuantisedWeight) else weight


# ---- ops after which the weight is still quantised; None: this call is none of them


def _swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _same(weight: QuantisedWeight, *_: Any, **__: Any) -> QuantisedWeight:
    return QuantisedWeight(weight.stored, weight.shape, weight.dtype, transposed=weight.transposed)


def _clone(weight: QuantisedWeight, **_: Any) -> QuantisedWeight:
    stored = weight.stored.apply(torch.Tensor.clone)
    return QuantisedWeight(stored, weight.shape, weight.dtype, transposed=weight.transposed)


def _to(weight: QuantisedWeight, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Move the bytes, and change the dtype that they are dequantised to."""
    dtype = dtype or weight.dtype
    if not dtype.is_floating_point:
        return None
    blocking = {"non_blocking": options.get("non_blocking", False)}
    stored = weight.stored if device is None else weight.stored.apply(lambda part: part.to(device, **blocking))
    return QuantisedWeight(stored, weight.shape, dtype, transposed=weight.transposed)


def _select(weight: QuantisedWeight, dim: int, index: int) -> QuantisedWeight | None:
    if weight.ndim != 3 or dim not in (0, -3):
        return None
    stored = weight.stored.apply(lambda part: part.narrow(0, index % weight.shape[0], 1))
    return QuantisedWeight(stored, weight.shape[1:], weight.dtype, transposed=weight.transposed)


def _transpose(weight: QuantisedWeight, dim0: int = -2, dim1: int = -1) -> QuantisedWeight | None:
    if {dim0 % weight.ndim, dim1 % weight.ndim} != {weight.ndim - 2, weight.ndim - 1}:
        return None
    return QuantisedWeight(weight.stored, _swapped(weight.shape), weight.dtype, transposed=not weight.transposed)


def _permute(weight: QuantisedWeight, dims: list[int]) -> QuantisedWeight | None:
    order = [dim % weight.ndim for dim in dims]
    is_transpose = order == list(_swapped(range(weight.ndim)))
    return _transpose(weight) if is_transpose else None


_aten = torch.ops.aten
_STAYS_PACKED: dict[Callable, Callable] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.lift_fresh.default: _same,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to,
    _aten.select.int: _select,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _permute,
}


def _dense(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantisedWeight) else value


def _rebuilt(
    stored: Stored, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool, parameter: bool
) -> torch.Tensor:
    weight = QuantisedWeight(stored, shape, dtype, transposed=transposed)
    return torch.nn.Parameter(weight, requires_grad=False) if parameter else weight


# ---- the weights that were dequantised last

_RECENT: OrderedDict[int, tuple[weakref.ref, tuple[int, ...], torch.Tensor]] = OrderedDict()


def _recent(stored: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a dequantised weight, of the last layer without computing it."""
    # A graph must not read memory that it does not write: neither a graph of CUDA nor one of torch.compile.
    capturing = stored.tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing:
        _RECENT.clear()  # a graph dequantises into its own memory pool, and does not use these
    if capturing or torch.compiler.is_compiling() or not KEPT_WEIGHTS:
        return _computed(stored, shape, dtype)
    key = id(stored.tensors[0])
    owner, versions, kept = _RECENT.get(key, (None, (), None))
    if owner is not None and owner() is stored.tensors[0] and versions == versions_of(stored) and kept.dtype == dtype:
        _RECENT.move_to_end(key)
        return kept
    _RECENT.pop(key, None)
    while len(_RECENT) >= KEPT_WEIGHTS:  # before the next one is allocated
        _RECENT.popitem(last=False)
    whole = _computed(stored, shape, dtype)
    # the weight's own bytes decide: with the model, its dequantised weights are freed
    _RECENT[key] = weakref.ref(stored.tensors[0], lambda gone: _forget(key, gone)), versions_of(stored), whole
    return whole


def _forget(key: int, gone: weakref.ref) -> None:
    if _RECENT.get(key, (None,))[0] is gone:
        del _RECENT[key]


def _computed(stored: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # inference_mode: the kept tensor may be read by the next training step
    with torch.inference_mode(False), torch.no_grad():
        experts = shape if len(shape) == 3 else (1, *shape)
        return stored.dequantize(experts, dtype).view(shape)
