"""Gradient checkpointing: layers keep their input alone, and are run again in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ligertune.activations.gate_offload import LayerRun, keep_gates
from ligertune.activations.offload import HostStore, Waiting
from ligertune.attention.sdpa import same_bits
from ligertune.errors import UserError
from ligertune.models.shape import text_layers

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
    left_out = () if first is None else _layers(model)[first:]
    inputs, gates = HostStore(), HostStore()  # each comes back in an order of its own
    kept = keep_gates(model, but=left_out) if kind in ("offload_gate", "offload_both") else 0
    contexts = _with_gates(gates) if kept else _recomputation
    enable({"use_reentrant": False} | ({} if compiled else {"context_fn": contexts}))
    let_inputs_be(model)
    for module in model.modules() if kind is not True else ():
        if hasattr(module, "_gradient_checkpointing_func"):
            checkpoint = module._gradient_checkpointing_func
            if kind != "offload_gate":
                checkpoint = _in_host_memory(checkpoint, inputs)
            module._gradient_checkpointing_func = _where_gradients_go(module, checkpoint)
    for layer in left_out:
        layer.gradient_checkpointing = False
    if len(left_out) and kind is not True:
        _pass_on(left_out[0], inputs, gates)
    return kept


def let_inputs_be(model: PreTrainedModel) -> None:
    """Take back that what embeddings give needs a gradient, which transformers and peft ask for with checkpointing.

    Only its reentrant kind needs that. Else it has frozen layers in front of all that trains, such as a tower of
    pictures, keep their inputs, run again and be gone back through, for a gradient that nobody takes.
    """
    model.disable_input_require_grads()


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The language model's; a UserError where they are not asked one by one whether they are checkpointed."""
    layers = text_layers(model)
    if layers is None or not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise UserError(
            f"train.gradient_checkpointing_layers: {type(model).__name__} checkpoints all its layers or none.",
            hint="Leave it out.",
        )
    return layers


def _pass_on(layer: nn.Module, *stores: HostStore) -> None:
    """From this layer on nothing is put away, and so nothing else tells what is leaving that it may go."""

    def before(*_: Any) -> None:
        for store in stores:
            store.passed()

    layer.register_forward_pre_hook(before)


def _where_gradients_go(module: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint of what a gradient comes back to: nobody would ask for what else is put away."""

    def chosen(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values(), *getattr(function, "keywords", {}).values())
        tensors = (t for t in (*given, *module.parameters()) if isinstance(t, Tensor))
        if any(t.requires_grad for t in tensors):
            return checkpoint(function, *args, **kwargs)
        return function(*args, **kwargs)

    return chosen


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
