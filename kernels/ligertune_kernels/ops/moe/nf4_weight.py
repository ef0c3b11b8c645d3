"""Nf4Weight: a frozen expert weight (X, rows, columns) stored in NF4 or FP4, with the dtype to which it is dequantised.

Its shape, dtype and device are those of the weight, so that transformers, PEFT and `patch` read it as they read any
weight. `weight[expert]` and transposes stay in 4 bits, and so do the weights that autograd saves for the backward:
every other op receives the dequantised weight, which is dropped after it. Ops that write to it raise RuntimeError.

`weight.dequantize()` keeps the two weights that it returned last (gate_up and down of one layer): a checkpointed layer
dequantises once for its second forward and its backward together.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ligertune_kernels.ops.moe.dequantize_nf4 import TENSORS, Nf4, absmax_of, dequantize_nf4, quantize_nf4
from ligertune_kernels.ops.moe.experts import Weight

KEPT_WEIGHTS = 2  # gate_up and down of one layer


class Nf4Weight(torch.Tensor):
    """Weights of X experts in 4 bits. nf4: their bytes; `transposed`: the last two dimensions are swapped."""

    nf4: Nf4
    transposed: bool

    @staticmethod
    def __new__(cls, nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool = False) -> Nf4Weight:
        """shape: as this tensor shows it, (X, rows, columns), or (rows, columns) of one expert."""
        stored = _swapped(shape) if transposed else tuple(shape)
        strides = torch.empty(stored, device="meta").stride()
        strides = _swapped(strides) if transposed else strides
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=nf4.packed.device, requires_grad=False
        )
        made.nf4 = nf4
        made.transposed = transposed
        return made

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its dtype. Read it only: the next call may return the same tensor."""
        stored = _swapped(self.shape) if self.transposed else tuple(self.shape)
        whole = _recent(self.nf4, stored, self.dtype) if self.ndim == 3 else _computed(self.nf4, stored, self.dtype)
        return whole.transpose(-2, -1) if self.transposed else whole

    def absmax(self) -> torch.Tensor:  # (X, blocks) float32
        """Return the largest absolute values of the blocks; NaN or infinity where a weight was no number."""
        return absmax_of(self.nf4)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        for name, tensor in zip(TENSORS, self.nf4.tensors, strict=True):
            setattr(self, name, tensor)
        return list(TENSORS), (self.dtype, self.transposed, self.nf4.quant_type, self.nf4.block)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], meta: Any, shape: Any, stride: Any) -> Nf4Weight:
        dtype, transposed, quant_type, block = meta
        nf4 = Nf4(*(parts[name] for name in TENSORS), quant_type, block)
        return cls(nf4, shape, dtype, transposed=transposed)

    def _stable_hash_for_caching(self) -> str:
        """Return what a compiled graph depends on. torch.compile asks tensor subclasses for it."""
        stored = f"{self.nf4.quant_type} {self.nf4.block} {self.nf4.is_nested}"
        return f"{tuple(self.shape)} {self.dtype} {self.device} {self.transposed} {stored}"

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Nf4Weight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _rebuilt, (
            self.nf4,
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
            raise RuntimeError(f"{func}: an Nf4Weight is frozen. Dequantise it, and write to the copy.")
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))


def to_nf4(
    weight: torch.Tensor,  # (X, rows, columns)
    device: torch.device | None = None,
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> Nf4Weight:
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
    return Nf4Weight(nf4, tuple(weight.shape), weight.dtype)


def as_weight(weight: torch.Tensor) -> Weight:
    """Return what `experts` takes: a function for a weight in 4 bits, anything else as it is."""
    return weight.dequantize if isinstance(weight, Nf4Weight) else weight


# ---- ops after which the weight is still in 4 bits; None: this call is none of them


def _swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _same(weight: Nf4Weight, *_: Any, **__: Any) -> Nf4Weight:
    return Nf4Weight(weight.nf4, weight.shape, weight.dtype, transposed=weight.transposed)


def _clone(weight: Nf4Weight, **_: Any) -> Nf4Weight:
    nf4 = weight.nf4.apply(torch.Tensor.clone)
    return Nf4Weight(nf4, weight.shape, weight.dtype, transposed=weight.transposed)


def _to(weight: Nf4Weight, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Move the bytes, and change the dtype that they are dequantised to."""
    dtype = dtype or weight.dtype
    if not dtype.is_floating_point:
        return None
    blocking = {"non_blocking": options.get("non_blocking", False)}
    nf4 = weight.nf4 if device is None else weight.nf4.apply(lambda part: part.to(device, **blocking))
    return Nf4Weight(nf4, weight.shape, dtype, transposed=weight.transposed)


def _select(weight: Nf4Weight, dim: int, index: int) -> Nf4Weight | None:
    if weight.ndim != 3 or dim not in (0, -3):
        return None
    nf4 = weight.nf4.apply(lambda part: part.narrow(0, index % weight.shape[0], 1))
    return Nf4Weight(nf4, weight.shape[1:], weight.dtype, transposed=weight.transposed)


def _transpose(weight: Nf4Weight, dim0: int = -2, dim1: int = -1) -> Nf4Weight | None:
    if {dim0 % weight.ndim, dim1 % weight.ndim} != {weight.ndim - 2, weight.ndim - 1}:
        return None
    return Nf4Weight(weight.nf4, _swapped(weight.shape), weight.dtype, transposed=not weight.transposed)


def _permute(weight: Nf4Weight, dims: list[int]) -> Nf4Weight | None:
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
    return value.dequantize() if isinstance(value, Nf4Weight) else value


def _rebuilt(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool, parameter: bool) -> torch.Tensor:
    weight = Nf4Weight(nf4, shape, dtype, transposed=transposed)
    return torch.nn.Parameter(weight, requires_grad=False) if parameter else weight


# ---- the weights that were dequantised last

_RECENT: OrderedDict[int, tuple[weakref.ref, tuple[int, ...], torch.Tensor]] = OrderedDict()


def _recent(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a dequantised weight, of the last layer without computing it."""
    # A graph must not read memory that it does not write: neither a graph of CUDA nor one of torch.compile.
    capturing = nf4.packed.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing:
        _RECENT.clear()  # a graph dequantises into its own memory pool, and does not use these
    if capturing or torch.compiler.is_compiling() or not KEPT_WEIGHTS:
        return _computed(nf4, shape, dtype)
    key = id(nf4.packed)
    owner, versions, kept = _RECENT.get(key, (None, (), None))
    if owner is not None and owner() is nf4.packed and versions == nf4.versions and kept.dtype == dtype:
        _RECENT.move_to_end(key)
        return kept
    _RECENT.pop(key, None)
    while len(_RECENT) >= KEPT_WEIGHTS:  # before the next one is allocated
        _RECENT.popitem(last=False)
    whole = _computed(nf4, shape, dtype)
    # the weight's own bytes decide: with the model, its dequantised weights are freed
    _RECENT[key] = weakref.ref(nf4.packed, lambda gone: _forget(key, gone)), nf4.versions, whole
    return whole


def _forget(key: int, gone: weakref.ref) -> None:
    if _RECENT.get(key, (None,))[0] is gone:
        del _RECENT[key]


def _computed(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # inference_mode: the kept tensor may be read by the next training step
    with torch.inference_mode(False), torch.no_grad():
        experts = shape if len(shape) == 3 else (1, *shape)
        return dequantize_nf4(nf4, experts, dtype).view(shape)
