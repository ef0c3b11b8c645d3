"""CUDA graphs (`train.cuda_graphs`): forward and backward of a micro-batch, recorded once and launched as one.

For few tokens, launching a step's kernels takes the host longer than running them takes the device. The first batch of
a shape runs as usual, which compiles kernels and plans; the second is recorded; later ones replay the recording.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligertune.errors import UserError, message_of
from ligertune.models.float8.delayed_scales import DelayedScales

MAX_GRAPHS = 16  # each keeps its inputs and launches in memory; further shapes run without a graph
# Entries of a batch that no device code reads: attention in one launch uses cu_seq_lens.
HOST_ONLY = ("document_lengths",)
HINT = "Write train.cuda_graphs: false."

Step = Callable[[dict[str, Any]], Tensor]
Shapes = tuple[tuple[Any, ...], ...]  # of a batch: its tensors' names, shapes and dtypes, and its other values


@dataclass(frozen=True)
class _Graph:
    """A recording, the tensors that it reads, and the loss that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor


class CudaGraphedStep:
    """Replace `step`, which computes a loss and adds its gradients to `parameters`, by recordings of it.

    Gradients stay at the addresses where the first graph wrote them. After the optimizer has dropped them, they are
    attached to their parameters again. The first graph overwrites gradients if it is the first of its step; all other
    graphs add to them.
    """

    def __init__(
        self,
        step: Step,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        *,
        required: bool = True,
        scales: DelayedScales | None = None,
    ) -> None:
        """required: a step that cannot be recorded is an error; else steps run without graphs from then on.

        scales: of float8 layers, which compute differently in the first optimizer step.
        """
        self._step = step
        self._device = device
        self._required = required
        self._scales = scales
        self._why_not: str | None = None  # why no step is recorded any more
        self._parameters = [p for p in parameters if p.requires_grad]
        self._graphs: dict[tuple[Shapes, bool], _Graph] = {}
        self._seen: set[Shapes] = set()
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._overwriting: Shapes | None = None  # the shapes of the graph that overwrites gradients
        self._pool: Any = None  # memory that all graphs share, because they never run at the same time
        self.replayed = self.launched = 0
        self.peak = 0  # allocated bytes while recording; torch does not count what a replay uses

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        """Return the loss (), detached; the next call may overwrite it."""
        if isinstance(batch.get("num_items_in_batch"), int):  # it changes in each step, so a graph must read it
            # torch.full launches a kernel; torch.tensor would copy from the host, which synchronises.
            count = torch.full((), batch["num_items_in_batch"], dtype=torch.int64, device=self._device)
            batch = {**batch, "num_items_in_batch": count}
        shapes = _shapes(batch)
        first_of_step = all(p.grad is None for p in self._parameters)
        overwrites = first_of_step and self._overwriting in (None, shapes)
        if first_of_step and self._gradients and not overwrites:
            self._attach_gradients()
            torch._foreach_zero_([gradient for _, gradient in self._gradients])
        key = (shapes, overwrites)
        graph = self._graphs.get(key)
        if graph is None:
            if not self._can_record(shapes, overwrites):
                if self._computes_as_later:
                    self._seen.add(shapes)
                self.launched += 1
                return self._step(batch).detach()
            graph = self._record(batch)
            if graph is None:
                self.launched += 1
                return self._step(batch).detach()
            self._graphs[key] = graph
            self._keep_gradients(shapes, overwrites)
        for name, tensor in graph.inputs.items():
            tensor.copy_(batch[name])
        graph.graph.replay()
        if overwrites:
            self._attach_gradients()
        self.replayed += 1
        return graph.loss

    def note(self) -> str:
        """Return the report's note on how many micro-batches ran as graphs."""
        counts = f"{self.replayed} micro batches by them, {self.launched} without"
        why = "" if self._why_not is None else f"; none after that: {self._why_not}"
        return f"CUDA graphs: {len(self._graphs)} recorded, {counts}{why}"

    @property
    def _computes_as_later(self) -> bool:
        """Whether a step computes as all later ones do."""
        return self._scales is None or self._scales.steps > 0

    def _can_record(self, shapes: Shapes, overwrites: bool) -> bool:
        """Require that the shape has run before, and that an adding graph has gradients at fixed addresses."""
        if self._why_not is not None:
            return False
        return shapes in self._seen and len(self._graphs) < MAX_GRAPHS and (overwrites or bool(self._gradients))

    def _keep_gradients(self, shapes: Shapes, overwrites: bool) -> None:
        """Keep the gradients of the overwriting graph; check that an adding graph has found all of them."""
        found = [(p, p.grad) for p in self._parameters if p.grad is not None]
        if overwrites:
            self._overwriting = shapes
            self._gradients = found
        elif len(found) != len(self._gradients):
            numbers = f"{len(found)} parameters got a gradient of one batch, {len(self._gradients)} of another."
            raise UserError(f"train.cuda_graphs: {numbers}", hint=HINT, exit_code=1)

    def _attach_gradients(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _forget_copies(self) -> None:
        if self._scales is not None:
            self._scales.forget_copies()

    def _record(self, batch: dict[str, Any]) -> _Graph | None:
        """Record the step. If something in it synchronises, which a graph cannot: raise UserError, or return None."""
        # A graph reads fixed addresses: each replay copies its batch to these.
        inputs = {name: value.clone() for name, value in batch.items() if isinstance(value, Tensor)}
        graph = torch.cuda.CUDAGraph()
        before = [(p, p.grad) for p in self._parameters]
        stream = torch.cuda.current_stream(self._device)
        torch.cuda.empty_cache()  # the graph allocates its own memory; earlier batches have freed as much
        self._forget_copies()  # the graph makes its own in each replay
        try:
            # thread_local: other threads (image reading, an asynchronous save) may synchronise meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = self._step({**batch, **inputs}).detach()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # if the recording cannot end, torch stays on its stream
            reason = f"forward and backward cannot be recorded: {message_of(error)}"
            if self._required:
                raise UserError(f"train.cuda_graphs: {reason}.", hint=HINT, exit_code=1) from error
            self._why_not = reason
            _end_recording()
            for parameter, gradient in before:
                parameter.grad = gradient
            return None
        self._forget_copies()  # the graph's memory holds them, and other graphs write there
        self._pool = graph.pool()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
        return _Graph(graph, inputs, loss)


def _end_recording() -> None:
    """Record an empty graph: after a failed recording torch's generator still expects the end of one."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device="cuda")


def _shapes(batch: dict[str, Any]) -> Shapes:
    """Return the key of a graph: names, shapes and dtypes of tensors, and the values of everything else."""
    return tuple(
        (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, value)
        for name, value in sorted(batch.items())
        if name not in HOST_ONLY
    )
