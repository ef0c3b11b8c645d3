"""What `lm_head` gives while a forward with labels runs: not logits but how to make them.

    forward(labels=...)   sets the thread's mark: the logits of this model are wanted for a loss only
    lm_head(hidden)       returns DeferredLogits(lm_head, hidden): no weight touched, no hook fired
    / scale, tanh, float  what the model does to its logits is written down on it
    loss_function(...)    hands hidden, labels, scale and soft cap back to lm_head.__call__, and `linear_cross_entropy`
                          runs inside that call, where DDP, FSDP, ZeRO-3 and offloading have the weight (`loss`)

Whatever else is done to a DeferredLogits computes the logits after all: same numbers, more memory, said once and
counted (`loss_counts`). Calls without labels, and so `generate()`, never meet any of this.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


@dataclass
class LabelledForward:
    """A forward with labels that is running: whose head is to defer, and whether logits were made in it."""

    head: nn.Module
    materialised: bool = False


class _ThisThread(threading.local):
    """A thread's state, not a context variable: torch.compile traces the first and breaks on the second."""

    forward: LabelledForward | None = None  # the innermost one
    loss_only: bool = False


THREAD = _ThisThread()


@contextlib.contextmanager
def loss_only() -> Iterator[None]:
    """Inside, evaluation with labels makes no logits either: `output.logits` is None, as it is in training."""
    before, THREAD.loss_only = THREAD.loss_only, True
    try:
        yield
    finally:
        THREAD.loss_only = before


@dataclass
class LossCounts:
    """How often the loss was computed without logits, and how often logits were made for it, by reason."""

    fused: int = 0
    materialised: Counter[str] = field(default_factory=Counter)


_COUNTS: weakref.WeakKeyDictionary[nn.Module, LossCounts] = weakref.WeakKeyDictionary()  # by output head


def loss_counts(model: nn.Module) -> LossCounts:
    """What happened in this process to the losses of the heads inside `model`; compiled calls are not counted."""
    total = LossCounts()
    for module in model.modules():
        if module in _COUNTS:
            total.fused += _COUNTS[module].fused
            total.materialised += _COUNTS[module].materialised
    return total


def count_fused(head: nn.Module) -> None:
    """One more loss of `head` without logits."""
    if not torch.compiler.is_compiling():
        _COUNTS.setdefault(head, LossCounts()).fused += 1


def count_materialised(head: nn.Module, reason: str) -> None:
    """Logits of `head` were made for a loss: said aloud the first time, counted every time."""
    if THREAD.forward is not None:
        THREAD.forward.materialised = True
    if torch.compiler.is_compiling():
        return
    counts = _COUNTS.setdefault(head, LossCounts())
    if not counts.materialised:
        text = f"the loss is computed from materialised logits (same numbers, more memory): {reason}"
        warnings.warn(text, stacklevel=2)
    counts.materialised[reason] += 1


class DeferredLogits:
    """The logits of `head(hidden)` after some operations, (..., V), not computed yet.

    A plain object and no tensor subclass: torch.compile inlines it. Once something needed the numbers they are kept,
    and from then on it stands for that tensor, so that writing into it is not lost.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, operations: tuple[tuple[str, Any], ...] = ()) -> None:
        self.head = head
        self.hidden = hidden
        self.operations = operations
        self.dense: Tensor | None = None

    def compute(self) -> Tensor:
        """The logits, with every recorded operation done as the model wrote it."""
        if self.dense is None:
            logits = self.head.logits(self.hidden)
            for name, value in self.operations:
                logits = OPERATIONS[name](logits, value)
            self.dense = logits
        return self.dense

    def materialise(self, reason: str) -> Tensor:
        """`compute` for something we did not foresee."""
        if self.dense is None:
            count_materialised(self.head, reason)
        return self.compute()

    def scale_and_softcap(self) -> tuple[float, float | None] | None:
        """(s, None) if logits = s * z, (c * t, c) if logits = c * tanh(t * z), where z = head(hidden); else None."""
        scale, inside = 1.0, None
        for name, value in self.operations:
            if name == "tanh":
                if inside is not None:
                    return None
                inside, scale = scale, 1.0
            elif name in ("mul", "div"):
                if isinstance(value, Tensor) and not _is_constant(value):
                    return None
                scale = scale * float(value) if name == "mul" else scale / float(value)
        return (scale, None) if inside is None else (inside * scale, scale)

    def _then(self, name: str, value: Any) -> DeferredLogits | Tensor:
        if self.dense is not None:
            return OPERATIONS[name](self.dense, value)
        return DeferredLogits(self.head, self.hidden, (*self.operations, (name, value)))

    # what models do between the head and the loss

    def __mul__(self, factor: Any) -> DeferredLogits | Tensor:
        if isinstance(factor, (int, float, Tensor)):
            return self._then("mul", factor)
        return self.materialise("the model multiplies its logits by no number") * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits | Tensor:
        if isinstance(divisor, (int, float, Tensor)):
            return self._then("div", divisor)
        return self.materialise("the model divides its logits by no number") / divisor

    def tanh(self) -> DeferredLogits | Tensor:
        return self._then("tanh", None)

    def float(self) -> DeferredLogits | Tensor:
        return self._then("to", torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits | Tensor:
        target = kwargs.get("dtype", args[0] if args else None)
        if len(args) + len(kwargs) == 1 and isinstance(target, torch.dtype) and target.is_floating_point:
            return self._then("to", target)
        if len(args) + len(kwargs) == 1 and isinstance(target, torch.device) and target == self.device:
            return self
        return self.materialise("the model uses .to of its logits").to(*args, **kwargs)

    def contiguous(self) -> DeferredLogits:
        return self

    # what can be said without computing

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        for name, value in reversed(self.operations):
            if name == "to":
                return value
        kind = self.hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.hidden.dtype

    # everything else needs the numbers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialise(f"the model uses .{name} of its logits"), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.tanh and not kwargs:
            return args[0].tanh()
        reason = f"the model calls {getattr(function, '__name__', function)} on its logits"
        args, kwargs = tree_map(
            lambda leaf: leaf.materialise(reason) if isinstance(leaf, cls) else leaf, (args, kwargs or {})
        )
        return function(*args, **kwargs)


OPERATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda logits, factor: logits * factor,
    "div": lambda logits, divisor: logits / divisor,
    "tanh": lambda logits, _: torch.tanh(logits),
    "to": lambda logits, dtype: logits.to(dtype),
}


def _is_constant(value: Tensor) -> bool:
    """One number that is not trained. Reading it off a GPU waits for the GPU; under torch.compile it cannot be read."""
    return value.numel() == 1 and value.ndim <= 1 and not value.requires_grad and not torch.compiler.is_compiling()


def _materialising(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.materialise(f"the model uses {name} of its logits"), name)(*args)

    method.__name__ = name
    return method


# Python looks these up on the class, past __getattr__. In-place *= and /= are not among them: without a method of
# their own they mean x = x * c, which is recorded.
_SPECIAL = """add radd sub rsub neg pos abs pow rpow matmul rmatmul rtruediv floordiv mod iadd isub ipow
              getitem setitem len iter bool eq ne lt le gt ge and or xor invert array"""
for _name in _SPECIAL.split():
    setattr(DeferredLogits, f"__{_name}__", _materialising(f"__{_name}__"))
