"""Deferred logits: while a forward with labels runs, `lm_head` returns how to compute its logits, not the logits.

    forward(labels=...)   notes in STATE that the logits of this model are needed for a loss only
    lm_head(hidden)       returns DeferredLogits(lm_head, hidden); reads no weight and calls no hook
    / scale, tanh, float  are recorded on it
    loss_function(...)    passes hidden states, labels, scale and soft cap back to lm_head.__call__, inside which
                          `linear_cross_entropy` runs: there DDP, FSDP, ZeRO-3 and offloading have the weight

Any other operation on a DeferredLogits computes the logits: same numbers, more memory, one warning, and a count in
`loss_counts`. After the forward, an output in training computes its logits when they are read (`lazy_output`). A head
with hooks (`observer_of`) returns its logits at once. Calls without labels, and so `generate()`, are not affected.
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
import torch.nn.functional as F
from ligertune_kernels.autograd import autocast_dtype
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ligertune.any_types import AnyModule
from ligertune.patching.host_copy import RowSearch


@dataclass
class LabelledForward:
    """A running forward with labels: the head that defers, the search for rows, and whether logits were computed."""

    head: nn.Module
    row_search: RowSearch | None = None
    materialised: bool = False


class _State(threading.local):
    """State of this thread. Not a context variable: torch.compile can trace a thread-local but not that."""

    def __init__(self) -> None:
        # Instance attributes and not class attributes: torch.compile guards on which of the two exists.
        self.forward: LabelledForward | None = None  # the innermost of nested forwards
        self.loss_only = False
        self.head_loss: Any = None  # a HeadLoss that forwards with labels compute instead of the cross-entropy
        self.counted = False  # whether the innermost call of a patched model has computed a loss


STATE = _State()


def next_tokens(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the label that each position predicts (B, T), from labels (B, T); the last position predicts none."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def targets_of(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return the label that each position predicts (B, T), which shift_labels are already."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None  # transformers' models compute a loss only if they got one of the two
    return next_tokens(labels, ignore_index)


@contextlib.contextmanager
def loss_only() -> Iterator[None]:
    """Let evaluation with labels compute no logits either: `output.logits` is None, as in training."""
    before = STATE.loss_only
    STATE.loss_only = True
    try:
        yield
    finally:
        STATE.loss_only = before


@dataclass
class LossCounts:
    """Number of losses of a model by how they were computed."""

    fused: int = 0  # in the output head, without logits
    materialised: Counter[str] = field(default_factory=Counter)  # from logits, by reason
    elsewhere: int = 0  # calls with labels in which the patched loss was not called

    def as_dict(self) -> dict[str, Any]:
        return {"fused": self.fused, "materialised": dict(self.materialised), "elsewhere": self.elsewhere}


_COUNTS: weakref.WeakKeyDictionary[nn.Module, LossCounts] = weakref.WeakKeyDictionary()  # by output head


def loss_counts(model: nn.Module) -> LossCounts:
    """Count how `model` computed its losses in this process since `patch`; compiled calls are not counted.

    Raises TypeError unless `model` is a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"loss_counts: the model must be a torch.nn.Module, and is a {type(model).__name__}")
    total = LossCounts()
    for module in model.modules():
        if module in _COUNTS:
            total.fused += _COUNTS[module].fused
            total.materialised += _COUNTS[module].materialised
            total.elsewhere += _COUNTS[module].elsewhere
    return total


def count_fused(head: nn.Module) -> None:
    """Count one loss of `head` without logits."""
    if not torch.compiler.is_compiling():
        _COUNTS.setdefault(head, LossCounts()).fused += 1


def count_materialised(head: nn.Module, reason: str) -> None:
    """Count one loss for which logits of `head` were computed; warn the first time."""
    if STATE.forward is not None:
        STATE.forward.materialised = True
    STATE.counted = True
    if torch.compiler.is_compiling():
        return
    counts = _COUNTS.setdefault(head, LossCounts())
    if not counts.materialised:
        text = f"the loss is computed from materialised logits (same numbers, more memory): {reason}"
        warnings.warn(text, stacklevel=2)
    counts.materialised[reason] += 1


def count_elsewhere(model: nn.Module, kernel: str) -> None:
    """Count one call of `model` with labels in which `kernel` did not compute its loss; warn the first time."""
    counts = _COUNTS.setdefault(model, LossCounts())
    if not counts.elsewhere:
        warnings.warn(
            f"{kernel} was patched into this {type(model).__name__} but did not run: a call with labels computed no "
            "loss by the model's loss_function. A trainer or wrapper computes it, with unchanged numbers",
            stacklevel=3,
        )
    counts.elsewhere += 1


@dataclass(frozen=True)
class ForwardModes:
    """Modes of torch and versions of the head's weights at the end of a forward, for logits that are read later."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    weights: dict[int, int]  # id -> version, which every write into a parameter raises

    @classmethod
    def now(cls, head: nn.Module, device: torch.device) -> ForwardModes:
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_dtype(device), _versions(head))

    @contextlib.contextmanager
    def restored(self, head: nn.Module, device: torch.device) -> Iterator[None]:
        """Compute as in the forward: logits read under `no_grad` still have gradients. Raises RuntimeError."""
        now = _versions(head)
        if any(now.get(key, version) != version for key, version in self.weights.items()):
            raise RuntimeError(f"the logits are read after the weights of the output head changed; {_KEEP_LOGITS}")
        autocast = torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), autocast:
            yield


_KEEP_LOGITS = "ligertune.patch(model, keep_logits=True) makes them in the forward"
_READ: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # heads whose logits were read after a forward


def _versions(head: nn.Module) -> dict[int, int]:
    return {id(weight): weight._version for weight in head.parameters() if not weight.is_inference()}


class DeferredLogits:
    """Logits (..., V) that are not computed yet: `head(hidden)` followed by the recorded operations.

    A plain object and not a tensor subclass, so that torch.compile inlines it. Once something needed the numbers they
    are kept in `dense`, and the object then acts as that tensor, so that writes into it are not lost.
    head: a LossHead (fused_loss.py). modes: of the forward that is over; None while it runs.
    """

    def __init__(
        self,
        head: AnyModule,
        hidden: Tensor,
        operations: tuple[tuple[str, Any], ...] = (),
        modes: ForwardModes | None = None,
    ) -> None:
        self.head = head
        self.hidden = hidden
        self.operations = operations
        self.modes = modes
        self.dense: Tensor | None = None

    def readable(self) -> DeferredLogits | Tensor:
        """Return the logits as an output holds them after the forward: computed already, or once they are read."""
        if self.dense is not None:
            return self.dense
        return DeferredLogits(self.head, self.hidden, self.operations, ForwardModes.now(self.head, self.hidden.device))

    def compute(self) -> Tensor:
        """Return the logits, with every recorded operation applied as the model wrote it."""
        if self.dense is None:
            logits: Tensor = self.head.logits(self.hidden)
            for name, value in self.operations:
                logits = OPERATIONS[name](logits, value)
            self.dense = logits
        return self.dense

    def materialise(self, reason: str) -> Tensor:
        """Compute the logits for an operation that cannot be recorded, and count the reason."""
        if self.dense is not None:
            return self.dense
        if self.modes is None:
            count_materialised(self.head, reason)
            return self.compute()
        if self.head not in _READ:
            _READ.add(self.head)
            text = (
                f"the logits of a training step are computed in addition to its loss, because {reason};"
                f" {_KEEP_LOGITS}, once"
            )
            warnings.warn(text, stacklevel=3)
        with self.modes.restored(self.head, self.hidden.device):
            return self.compute()

    def scale_and_softcap(self) -> tuple[float, float | None] | None:
        """Return (s, None) for logits = s * z, (c * t, c) for c * tanh(t * z), where z = head(hidden); else None."""
        scale = 1.0
        inside = None
        for name, value in self.operations:
            if name == "tanh":
                if inside is not None:
                    return None
                inside = scale
                scale = 1.0
            elif name in ("mul", "div"):
                if isinstance(value, Tensor) and not _is_constant(value):
                    return None
                scale = scale * float(value) if name == "mul" else scale / float(value)
        return (scale, None) if inside is None else (inside * scale, scale)

    def _then(self, name: str, value: Any) -> DeferredLogits | Tensor:
        if self.dense is not None:
            return OPERATIONS[name](self.dense, value)
        return DeferredLogits(self.head, self.hidden, (*self.operations, (name, value)), self.modes)

    # operations of models between the head and the loss

    def __mul__(self, factor: Any) -> DeferredLogits | Tensor:
        if isinstance(factor, (int, float, Tensor)):
            return self._then("mul", factor)
        return self.materialise("the model multiplies its logits by something that is not a number") * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits | Tensor:
        if isinstance(divisor, (int, float, Tensor)):
            return self._then("div", divisor)
        return self.materialise("the model divides its logits by something that is not a number") / divisor

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
        return self.materialise("the model calls .to on its logits").to(*args, **kwargs)

    def contiguous(self) -> DeferredLogits:
        return self

    # properties that need no logits

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
        if self.modes is not None:
            return self.modes.autocast or self.hidden.dtype
        return autocast_dtype(self.hidden.device) or self.hidden.dtype

    # everything else needs the numbers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialise(f"the model uses .{name} of its logits"), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
    """Return whether a tensor is one number that is not trained. Under torch.compile it cannot be read."""
    return value.numel() == 1 and value.ndim <= 1 and not value.requires_grad and not torch.compiler.is_compiling()


def _materialising(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.materialise(f"the model uses {name} of its logits"), name)(*args)

    method.__name__ = name
    return method


# Python looks these up on the class and not through __getattr__. In-place *= and /= are left out: without a method
# they mean x = x * c, which is recorded.
_SPECIAL = """add radd sub rsub neg pos abs pow rpow matmul rmatmul rtruediv floordiv mod iadd isub ipow
              getitem setitem len iter bool eq ne lt le gt ge and or xor invert array"""
for _name in _SPECIAL.split():
    setattr(DeferredLogits, f"__{_name}__", _materialising(f"__{_name}__"))
