"""Gradient checkpointing: layers keep their input alone, and are run again in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ligertune.model.attention import same_bits
from ligertune.model.host_store import HostStore, Waiting
from ligertune.model.kept_gate import LayerRun, keep_gates

Kind = Literal[True, "offload", "offload_gate"]  # as train.gradient_checkpointing says it
Contexts = tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]


def checkpoint_layers(model: PreTrainedModel, kind: Kind = True, *, compiled: bool = False) -> int:
    """Keep only the layers' inputs; how many gates wait on the host beside them.

    offload: the inputs wait in host memory. offload_gate: the gates of MLPs do, and are not computed again.
    compiled: the layers are, forward and backward in one mode; a graph takes no context for what it runs again.
    """
    # 5.23's name for what 5.17 calls gradient checkpointing
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    store, gates = HostStore(), keep_gates(model) if kind == "offload_gate" else 0
    contexts = _with_gates(store) if gates else _recomputation
    enable({"use_reentrant": False} | ({} if compiled else {"context_fn": contexts}))
    for module in model.modules() if kind == "offload" else ():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _in_host_memory(module._gradient_checkpointing_func, store)
    return gates


def _in_host_memory(checkpoint: Callable[..., Any], store: HostStore) -> Callable[..., Any]:
    """A checkpoint whose inputs wait on the host."""

    def pack(tensor: Tensor) -> Tensor | Waiting:
        return store.put(tensor) if tensor.is_cuda and tensor.is_floating_point() else tensor

    def unpack(kept: Tensor | Waiting) -> Tensor:
        return kept.take() if isinstance(kept, Waiting) else kept

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return checkpoint(*args, **kwargs)

    return offloaded


def _recomputation() -> Contexts:
    """torch.utils.checkpoint's `context_fn`: layers are run again inside the backward, as they were before it."""
    return contextlib.nullcontext(), _EachTime(partial(same_bits, False))


def _with_gates(store: HostStore) -> Callable[[], Contexts]:
    def contexts() -> Contexts:
        run = LayerRun(store)
        again = _EachTime(partial(same_bits, False), partial(run.running, again=True))
        return run.running(again=False), again

    return contexts


class _EachTime(contextlib.AbstractContextManager):
    """Contexts made anew each time: where a graph is kept, its layers are run once more for each backward."""

    def __init__(self, *makes: Callable[[], contextlib.AbstractContextManager]) -> None:
        self._makes = makes
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for make in self._makes:
            self._stack.enter_context(make())

    def __exit__(self, *error: Any) -> None:
        self._stack.pop_all().__exit__(*error)
