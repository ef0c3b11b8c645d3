"""Activations that are made again in the backward instead of being kept: norms' outputs and gated products.

A linear layer keeps its input for its weight's gradient. Where that input is norm(x) or act(gate) * up, the op that
made it keeps x, gate and up for its own backward, so the input can be made again from them by the same kernel, to the
bit. `made_again` says so on the output, `RebuildingLinear` reads it off its input. Of a Llama-3-8B layer's 139 kB a
token 45 are saved, for one more forward of two norms and a SwiGLU.

Saved-tensor hooks do it, around one linear's forward at a time: around a model they would see every op, and would keep
what an op gave in a circle with that op. Where others' hooks are at work (checkpointing, offloading) nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ligertune.patching.module_patch import Patch, swap

WRITTEN_OVER = (
    "a tensor of {shape} that the backward needs has been written over since the forward (kernels.recompute): "
    "run the forward again before a second backward, and step after it"
)


class _Unchanged:
    """A tensor that must still be in the backward what it is now, as autograd demands of all that it saves."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(WRITTEN_OVER.format(shape=tuple(self._tensor.shape)))
        return self._tensor


class Rebuilt:
    """How to make one tensor again: `op` of `sources`.

    Several layers may have read it (queries, keys and values one norm's output). What is made for the first of them
    serves the others, and is dropped after the last.
    """

    def __init__(self, op: Callable[..., Tensor], sources: tuple[Tensor, ...], output: Tensor) -> None:
        self._op = op
        self._sources = tuple(_Unchanged(source.detach()) for source in sources)  # the version stays shared
        self._version = output._version
        self._readers = 0
        self._to_come = 0
        self._made: Tensor | None = None

    def makes(self, output: Tensor) -> bool:
        """Is `output` still what `op` gave, and not written over?"""
        return output._version == self._version

    def standing_for(self, tensor: Tensor) -> saved_tensors_hooks:
        """Hooks that keep this in place of `tensor`, which is its output or a cast of it, and all else as it is."""
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
        """The tensor, for one of those that read it."""
        if self._made is None:
            self._made = self._op(*(source.tensor() for source in self._sources))
            self._to_come = self._readers
        made = self._made
        self._to_come -= 1
        if self._to_come == 0:
            self._made = None
        return made


class _View:
    """What a linear keeps of a tensor that is made again: of what, and in which dtype and shape it read it."""

    def __init__(self, rebuilt: Rebuilt, saved: Tensor) -> None:
        self._rebuilt, self._dtype = rebuilt, saved.dtype
        self._size, self._stride = saved.size(), saved.stride()

    def tensor(self) -> Tensor:
        return self._rebuilt.take().to(self._dtype).as_strided(self._size, self._stride)


def made_again(output: Tensor, op: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """`output`, marked as what `op(*sources)` gives whenever a layer needs it in its backward.

    Autograd must keep the sources anyway, and `op` must give the same bits in the same layout.
    """
    if output.requires_grad and not torch.compiler.is_compiling():
        output.rebuilt = Rebuilt(op, sources, output)
    return output


class Rebuilding:
    """Marks the mixins of modules that say of their output how to make it again."""


class RebuildingLinear(Patch):
    """Mixin of a plain nn.Linear: of an input that can be made again it keeps only how."""

    def forward(self, input: Tensor) -> Tensor:
        rebuilt = rebuilt_of(input)
        if rebuilt is None:
            return super().forward(input)
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype is not torch.float64:  # as autocast would within the op
            input = input.to(torch.get_autocast_dtype(kind))
        with rebuilt.standing_for(input):
            return super().forward(input)


def rebuilt_of(input: Any) -> Rebuilt | None:
    """How to make the input again, if that is known, and if it is for us to say what autograd keeps."""
    if torch.compiler.is_compiling() or type(input) is not Tensor or not torch.is_grad_enabled():
        return None
    rebuilt = getattr(input, "rebuilt", None)
    if rebuilt is None or input.is_meta or not rebuilt.makes(input):
        return None
    autograd = torch._C._autograd
    free = autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(False) is None
    return rebuilt if free else None


def is_linear(module: nn.Module | None) -> bool:
    """Is it torch's nn.Linear, or one that differs only in what it keeps of its input and how it gives gradients?"""
    mixin = getattr(type(module), "patch_mixin", None)
    return type(module) is nn.Linear or (mixin is not None and issubclass(mixin, RebuildingLinear))


def is_whole(weight: Tensor) -> bool:
    """Is it not in parts, and not ZeRO's, which gathers a layer's weights where that layer is called?"""
    return type(weight) in (Tensor, nn.Parameter) and not hasattr(weight, "ds_id")


def rebuild_inputs(model: nn.Module, *, but: nn.Module | None = None) -> None:
    """Let the plain linear layers inside `model` make their inputs again where those say how; all but one."""
    for module in model.modules():
        if type(module) is nn.Linear and module is not but and "forward" not in vars(module):
            swap(module, RebuildingLinear, None)


def is_rebuilding(model: nn.Module) -> bool:
    """Whether it was patched with `recompute`."""
    return any(isinstance(module, Rebuilding) for module in model.modules())
