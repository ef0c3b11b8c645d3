"""Recompute the outputs of norms and gated products in the backward instead of keeping them.

A linear layer keeps its input for its weight's gradient. Where that input is norm(x) or act(gate) * up, the op that
computed it keeps x, gate and up for its own backward, so the same kernel can compute the input again, bit for bit.
`mark_recomputable` attaches the op and its inputs to the output, and `RecomputingLinear` reads them from its input. Of
the 139 kB per token of a Llama-3-8B layer this saves 45, for one more forward of two norms and a SwiGLU.

The mechanism is saved-tensor hooks around one linear layer's forward at a time. Around a whole model they would see
every op, and an op whose own output they keep would be part of a reference cycle. Where other saved-tensor hooks are
active (checkpointing, offloading) nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ligertune.patching.module_patch import ModulePatch, patch_module

WRITTEN_OVER = (
    "a tensor of {shape} that the backward needs has been written over since the forward (kernels.recompute): "
    "run the forward again before a second backward, and step after it"
)


class _Unchanged:
    """A saved tensor that must not be written over before the backward, as autograd demands of all saved tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(WRITTEN_OVER.format(shape=tuple(self._tensor.shape)))
        return self._tensor


class Recomputation:
    """How to compute one tensor again: `op(*sources)`.

    Several layers may have read the tensor (queries, keys and values read one norm's output). What is recomputed for
    the first of them serves the others and is freed after the last.
    """

    def __init__(self, op: Callable[..., Tensor], sources: tuple[Tensor, ...], output: Tensor) -> None:
        self._op = op
        self._sources = tuple(_Unchanged(source.detach()) for source in sources)  # detach shares the version counter
        self._version = output._version
        self._readers = 0
        self._reads_left = 0
        self._recomputed: Tensor | None = None

    def still_computes(self, output: Tensor) -> bool:
        """Return whether `output` has not been written over since `op` computed it."""
        return output._version == self._version

    def replacing(self, tensor: Tensor) -> saved_tensors_hooks:
        """Return hooks that save this object instead of `tensor`, the output or a cast of it, and all else as it is."""
        # Not the tensor itself: autograd keeps the hooks.
        pointer, numel, dtype = tensor.data_ptr(), tensor.numel(), tensor.dtype

        def pack(saved: Tensor) -> _Unchanged | _View:
            if saved.data_ptr() != pointer or saved.numel() != numel or saved.dtype != dtype:
                return _Unchanged(saved)
            self._readers += 1
            return _View(self, saved)

        return saved_tensors_hooks(pack, methodcaller("tensor"))

    @torch.no_grad()
    def take(self) -> Tensor:
        """Return the tensor, for one of its readers."""
        if self._recomputed is None:
            self._recomputed = self._op(*(source.tensor() for source in self._sources))
            self._reads_left = self._readers
        recomputed = self._recomputed
        self._reads_left -= 1
        if self._reads_left == 0:
            self._recomputed = None
        return recomputed


class _View:
    """What a linear layer saves of a recomputable tensor: the recomputation, and the dtype and strides it read."""

    def __init__(self, recomputation: Recomputation, saved: Tensor) -> None:
        self._recomputation = recomputation
        self._dtype = saved.dtype
        self._size = saved.size()
        self._stride = saved.stride()

    def tensor(self) -> Tensor:
        return self._recomputation.take().to(self._dtype).as_strided(self._size, self._stride)


def mark_recomputable(output: Tensor, op: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Attach to `output` that `op(*sources)` computes it, and return it.

    Autograd must keep the sources anyway, and `op` must return the same bits in the same layout.
    """
    if output.requires_grad and not torch.compiler.is_compiling():
        marked: Any = output
        marked.recomputation = Recomputation(op, sources, output)
    return output


class RecomputableOutput:
    """Marker of the mixins that call `mark_recomputable` on their output."""


class LinearPatch(ModulePatch):
    """Marker of the mixins of an nn.Linear that keep no reference to its output."""

    weight: Tensor
    bias: Tensor | None

    def gives_new_output(self, x: Tensor) -> bool:
        return True


class RecomputingLinear(LinearPatch):
    """Mixin of a plain nn.Linear: instead of a recomputable input it keeps the recomputation."""

    def forward(self, input: Tensor) -> Tensor:
        recomputation = recomputation_of(input)
        if recomputation is None:
            return super().forward(input)
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype is not torch.float64:  # as autocast would within the op
            input = input.to(torch.get_autocast_dtype(kind))
        with recomputation.replacing(input):
            return super().forward(input)


def recomputation_of(input: Any) -> Recomputation | None:
    """Return how to recompute the input; None if that is unknown, or other hooks decide what autograd keeps."""
    if torch.compiler.is_compiling() or type(input) is not Tensor or not torch.is_grad_enabled():
        return None
    recomputation = getattr(input, "recomputation", None)
    # the address of every meta tensor is 0, and `replacing` knows the input by its address
    if recomputation is None or input.is_meta or not recomputation.still_computes(input):
        return None
    autograd: Any = torch._C._autograd
    free = autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(False) is None
    return recomputation if free else None


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is torch's nn.Linear, or a `RecomputingLinear` made of it."""
    mixin = getattr(type(module), "patch_mixin", None)
    return type(module) is nn.Linear or (mixin is not None and issubclass(mixin, RecomputingLinear))


def is_whole(weight: Tensor) -> bool:
    """Return whether a weight is neither sharded nor gathered by ZeRO when its layer is called."""
    return type(weight) in (Tensor, nn.Parameter) and not hasattr(weight, "ds_id")


def recompute_inputs(model: nn.Module, *, but: nn.Module | None = None) -> None:
    """Let the plain linear layers inside `model`, except `but`, recompute their inputs where those are recomputable."""
    for module in model.modules():
        if type(module) is nn.Linear and module is not but and "forward" not in vars(module):
            patch_module(module, RecomputingLinear)


def has_recompute(model: nn.Module) -> bool:
    """Return whether `model` was patched with `recompute`."""
    return any(isinstance(module, RecomputableOutput) for module in model.modules())
