"""Gradient checkpointing: layers keep their input alone, and are run again in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ligertune.errors import UserError
from ligertune.model.attention import same_bits
from ligertune.model.host_store import HostStore, Waiting
from ligertune.model.kept_gate import LayerRun, keep_gates
from ligertune.model.layer_shape import text_layers

Kind = Literal[True, "offload", "offload_gate", "offload_both"]  # as train.gradient_checkpointing says it
Contexts = tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]


def checkpoint_layers(
    model: PreTrainedModel, kind: Kind = True, *, compiled: bool = False, first: int | None = None
) -> int:
    """Keep only the layers' inputs; how many gates wait on the host beside them.

    offload: the inputs wait in host memory. offload_gate: the gates of MLPs do, and are not computed again.
    offload_both: both. first: so many of the language model's layers, and the others keep what they have; None: all.
    compiled: the layers are, forward and backward in one mode; a graph takes no context for what it runs again.
    """
    # 5.23's name for what 5.17 calls gradient checkpointing
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    inputs, gates = HostStore(), HostStore()  # each comes back in an order of its own
    kept = keep_gates(model) if kind in ("offload_gate", "offload_both") else 0
    contexts = _with_gates(gates) if kept else _recomputation
    enable({"use_reentrant": False} | ({} if compiled else {"context_fn": contexts}))
    for module in model.modules() if kind in ("offload", "offload_both") else ():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _in_host_memory(module._gradient_checkpointing_func, inputs)
    if first is not None:
        _leave_out(model, first, (inputs, gates) if kind is not True else ())
    return kept


def _leave_out(model: PreTrainedModel, first: int, stores: Sequence[HostStore]) -> None:
    """Let the layers behind the first ones keep what they have; a UserError where a layer is not asked whether to."""
    layers = text_layers(model)
    if layers is None or not all(hasattr(layer, "_gradient_checkpointing_func") for layer in layers):
        raise UserError(
            f"train.gradient_checkpointing_layers: {type(model).__name__} checkpoints all its layers or none.",
            hint="Leave it out.",
        )
    for layer in layers[first:]:
        layer.gradient_checkpointing = False

    def pass_on(*_: Any) -> None:
        for store in stores:
            store.passed()

    if stores and first < len(layers):  # nothing is put away from there on, and so nothing else tells what is leaving
        layers[first].register_forward_pre_hook(pass_on)


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
