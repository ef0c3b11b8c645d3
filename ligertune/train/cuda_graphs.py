"""Forward and backward of a micro batch as one CUDA graph, which the host launches at once and not kernel by kernel.

A step on few tokens takes the host longer to launch than its device to compute. The first batch of a shape is computed
as ever, which compiles and plans what is new to the process; the second is recorded; from then on that is replayed.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligertune.errors import UserError

MOST_GRAPHS = 16  # a run on batches of ever other shapes goes on without; each keeps its inputs, and its launches
UNREAD = ("document_lengths",)  # of a batch, by what runs on the device: attention in one launch goes by cu_seq_lens

Step = Callable[[dict[str, Any]], Tensor]


@dataclass(frozen=True)
class _Graph:
    """What was recorded, the tensors that it reads, and the loss that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor


class GraphedSteps:
    """Called in place of `step`, which computes a loss and adds its gradients to `parameters`.

    Gradients stand where the first graph wrote them, and stay there: a parameter gets them back where the optimizer has
    taken them away. That graph writes them, if it is the first of its step; all others add to them.
    """

    def __init__(self, step: Step, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._step, self._device = step, device
        self._parameters = [p for p in parameters if p.requires_grad]
        self._graphs: dict[tuple, _Graph] = {}
        self._seen: set[tuple] = set()
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._writes: tuple | None = None  # the shapes of the graph that writes gradients
        self._pool: Any = None  # of memory: graphs take turns in it
        self.replayed = self.launched = 0
        self.peak = 0  # bytes: what graphs use is not counted when they are replayed

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        """The loss, without a history; the next call may overwrite it."""
        if isinstance(batch.get("num_items_in_batch"), int):  # another number in each step, so it has to be an input
            # full is a kernel; torch.tensor would copy from the host, which waits
            count = torch.full((), batch["num_items_in_batch"], dtype=torch.int64, device=self._device)
            batch = {**batch, "num_items_in_batch": count}
        shapes = _shapes(batch)
        begins = all(p.grad is None for p in self._parameters)
        writes = begins and self._writes in (None, shapes)
        if begins and self._gradients and not writes:
            self._begin_with_zeros()
        name = (shapes, writes)
        graph = self._graphs.get(name)
        if graph is None:
            if not self._records(shapes, writes):
                self._seen.add(shapes)
                self.launched += 1
                return self._step(batch).detach()
            graph = self._graphs[name] = self._record(batch)
            self._take_gradients(shapes, writes)
        for key, tensor in graph.inputs.items():
            tensor.copy_(batch[key])
        graph.graph.replay()
        if writes:
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
        self.replayed += 1
        return graph.loss

    def note(self) -> str:
        """What came of it."""
        return (
            f"CUDA graphs: {len(self._graphs)} recorded, {self.replayed} micro batches by them, {self.launched} without"
        )

    def _records(self, shapes: tuple, writes: bool) -> bool:
        """Not what is new to the process, and nothing before there are gradients that stay."""
        return shapes in self._seen and len(self._graphs) < MOST_GRAPHS and (writes or bool(self._gradients))

    def _take_gradients(self, shapes: tuple, writes: bool) -> None:
        """What stays from now on, where a graph was recorded that writes it; another must have found all there."""
        found = [(p, p.grad) for p in self._parameters if p.grad is not None]
        if writes:
            self._writes, self._gradients = shapes, found
        elif len(found) != len(self._gradients):
            raise UserError(
                f"train.cuda_graphs: {len(found)} parameters got a gradient of one batch, {len(self._gradients)} of "
                "another.",
                hint="Write train.cuda_graphs: false.",
                exit_code=1,
            )

    def _begin_with_zeros(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        torch._foreach_zero_([gradient for _, gradient in self._gradients])

    def _record(self, batch: dict[str, Any]) -> _Graph:
        """A UserError where something in the step waits for the device, which a graph cannot."""
        inputs = {name: value.clone() for name, value in batch.items() if isinstance(value, Tensor)}
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads (pictures, an asynchronous save) may wait for what they like meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = self._step({**batch, **inputs}).detach()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"train.cuda_graphs: forward and backward cannot be recorded: {str(error).splitlines()[0]}.",
                hint="Write train.cuda_graphs: false.",
                exit_code=1,
            ) from error
        self._pool = graph.pool()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
        return _Graph(graph, inputs, loss)


def _shapes(batch: dict[str, Any]) -> tuple:
    """What a graph is recorded for: the tensors' sizes, and all numbers beside them."""
    return tuple(
        (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, value)
        for name, value in sorted(batch.items())
        if name not in UNREAD
    )
