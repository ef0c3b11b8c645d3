"""Gradient checkpointing: layers keep only their input and run again in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ligertune.activations.gate_offload import OFFLOADED_GATES, offload_gates
from ligertune.activations.offload import ActivationOffloader, OffloadedTensors
from ligertune.activations.random_state import RandomNumbers, RandomNumbersOfLayer
from ligertune.activations.second_run import CheckpointedLayer
from ligertune.any_types import AnyModule
from ligertune.attention.torch_attention import deterministic_backward
from ligertune.errors import UserError
from ligertune.hardware import available_memory, ranks_on_node
from ligertune.models.shape import text_layers

Kind = Literal[True, "offload", "offload_gate", "offload_both"]  # the values of train.gradient_checkpointing
SHARE_OF_HOST = 4  # results of attention take at most a quarter of the free memory
Context = contextlib.AbstractContextManager[None]


def checkpoint_layers(
    model: PreTrainedModel, kind: Kind = True, *, compiled: bool = False, first: int | None = None, overlap: bool = True
) -> int:
    """Checkpoint the layers of `model` and return the number of gates that are offloaded.

    kind: "offload" moves the layers' inputs to host memory, and with `overlap` the results of attention, which are then
    not recomputed; "offload_gate" moves the gates of MLPs there; "offload_both" moves inputs and gates. first:
    checkpoint only this many layers of the language model; None: all layers. compiled: the layers are compiled, forward
    and backward in one mode; a graph takes no context for its second run. overlap: as `ActivationOffloader` has it.
    """
    # transformers 5.23 renamed the method
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    left_out: Sequence[AnyModule] = () if first is None else _layers(model)[first:]
    # several offloaders: layer inputs, results and gates are read back in different orders
    inputs = ActivationOffloader(overlap=overlap)
    results = None
    if kind == "offload" and overlap:
        results = ActivationOffloader(priority=inputs, max_pinned=_max_pinned_results())
    gates = ActivationOffloader()
    count = offload_gates(model, but=left_out) if kind in OFFLOADED_GATES else 0
    contexts = partial(_contexts, gates, results, RandomNumbers())
    enable({"use_reentrant": False} | ({} if compiled else {"preserve_rng_state": False, "context_fn": contexts}))
    # transformers and peft let the embeddings' output require gradients, for reentrant checkpointing. Without that,
    # frozen layers before the first trained one, such as a tower, would run again for gradients nothing uses.
    model.disable_input_require_grads()
    modules: Iterable[AnyModule] = model.modules() if kind is not True else ()
    for module in modules:
        if hasattr(module, "_gradient_checkpointing_func"):
            checkpoint = module._gradient_checkpointing_func
            if kind != "offload_gate":
                checkpoint = _in_host_memory(checkpoint, inputs)
            module._gradient_checkpointing_func = _only_with_gradients(module, checkpoint)
    for layer in left_out:
        layer.gradient_checkpointing = False
    if len(left_out) and kind is not True:
        # From there on nothing is stored that would release the tensor being copied.
        for offloader in filter(None, (inputs, results, gates)):
            left_out[0].register_forward_pre_hook(lambda *_, offloader=offloader: offloader.flush())
    return count


def _max_pinned_results() -> int | None:
    """Return the bytes of pinned memory that results may take in this process; None if free memory is unknown."""
    available = available_memory()
    return None if available is None else available // (SHARE_OF_HOST * ranks_on_node())


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the language model's layers. Raises UserError if they cannot be checkpointed one by one."""
    layers = text_layers(model)
    if layers is None or not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise UserError(
            f"train.gradient_checkpointing_layers: {type(model).__name__} checkpoints all its layers or none.",
            hint="Leave it out.",
        )
    return list(layers)


def _only_with_gradients(module: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint that stores only what a backward reads: calls that need no gradient run without it."""

    def chosen(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = (*args, *kwargs.values(), *getattr(function, "keywords", {}).values())
        tensors = (t for t in (*inputs, *module.parameters()) if isinstance(t, Tensor))
        if any(t.requires_grad for t in tensors):
            return checkpoint(function, *args, **kwargs)
        return function(*args, **kwargs)

    return chosen


def _in_host_memory(checkpoint: Callable[..., Any], offloader: ActivationOffloader) -> Callable[..., Any]:
    """Return a checkpoint whose inputs are offloaded."""

    def pack(tensor: Tensor) -> Tensor | OffloadedTensors:
        return offloader.store(tensor) if tensor.is_cuda and tensor.is_floating_point() else tensor

    def unpack(saved: Tensor | OffloadedTensors) -> Tensor:
        return saved.take()[0] if isinstance(saved, OffloadedTensors) else saved

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return checkpoint(*args, **kwargs)

    return offloaded


def _contexts(
    gates: ActivationOffloader, results: ActivationOffloader | None, numbers: RandomNumbers
) -> tuple[Context, Context]:
    """Return torch.utils.checkpoint's contexts: the second run has mode and random numbers of the first."""
    layer = CheckpointedLayer(gates, results)
    drawn = RandomNumbersOfLayer(numbers)
    first = _Reusable(partial(layer.running, again=False), drawn.first)
    return first, _Reusable(partial(deterministic_backward, False), partial(layer.running, again=True), drawn.again)


class _Reusable(contextlib.AbstractContextManager[None]):
    """Contexts that can be entered many times: with retain_graph layers run again in each backward."""

    def __init__(self, *makes: Callable[[], Context]) -> None:
        self._makes = makes
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for make in self._makes:
            self._stack.enter_context(make())

    def __exit__(self, *error: Any) -> None:
        self._stack.pop_all().__exit__(*error)
