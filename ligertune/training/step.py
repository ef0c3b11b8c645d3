"""One optimizer step: forward and backward of each micro-batch, gradient clipping, optimizer update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ligertune.attention.torch_attention import deterministic_backward
from ligertune.features.task import Task
from ligertune.models.float8.float8_linear import scales_of
from ligertune.planning.plan import Plan
from ligertune.training.cuda_graphs import CudaGraphedStep
from ligertune.training.optim.gradients import check_gradients, clip_gradients
from ligertune.training.parallel.distributed import reduce_max, uses_deepspeed

Rows = Sequence[np.ndarray]  # the rows of one micro-batch, each as example indices
# Trains on one global batch, as `TrainStep.__call__` does; a Python user may bring another.
StepFunction = Callable[[Sequence[Rows], Callable[[Rows], dict[str, Any]], dict[str, Any], Tensor], Tensor | None]


class TrainStep:
    """Train on one global batch. Called with this rank's micro-batches; returns the gradient norm before clipping."""

    def __init__(
        self, plan: Plan, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task
    ) -> None:
        self._plan = plan
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._task = task
        self._deterministic = plan.build.execution.full_determinism
        self._parameters: tuple[nn.Parameter, ...] = ()
        alpha = plan.build.execution.neftune_noise_alpha
        embedding = None if alpha is None else accelerator.unwrap_model(model).get_input_embeddings()
        self._noise = None if alpha is None or embedding is None else EmbeddingNoise(embedding, alpha)
        self._float8 = scales_of(model)
        wanted = plan.build.execution.cuda_graphs
        self.graphs = None
        if wanted and accelerator.device.type == "cuda":
            required = wanted is True
            self.graphs = CudaGraphedStep(
                self._launch, model.parameters(), accelerator.device, required=required, scales=self._float8
            )

    def __call__(
        self,
        micro_batches: Sequence[Rows],
        make_batch: Callable[[Rows], dict[str, Any]],
        loss_inputs: dict[str, Any],
        loss_sum: Tensor,
    ) -> Tensor | None:
        """Update the weights; return grad_norm (), or None if `max_grad_norm` is 0.

        make_batch: the fields of a batch, of the rows of one micro-batch. loss_inputs: `Task.inputs` of the global
        batch; `num_items_in_batch` among them divides the loss by the trained tokens of the global batch. loss_sum ():
        this rank's loss is added to it in place.
        """
        for i, rows in enumerate(micro_batches):
            batch = make_batch(rows)
            with self._gradient_sync(last=i == len(micro_batches) - 1):
                # The next forward may overwrite this loss.
                loss_sum += (self.graphs or self._launch)({**batch, **loss_inputs})
        return self._update()

    def _launch(self, batch: dict[str, Any]) -> Tensor:
        attention = self._plan.attn_implementation
        noise = contextlib.nullcontext() if self._noise is None else self._noise.of_batch(batch)
        # Only compiled layers, whose backward is compiled in the forward, need the mode here: `deterministic_backward`.
        with noise, deterministic_backward(self._deterministic and self._plan.build.execution.torch_compile, attention):
            loss = self._task.loss(self._model, batch)
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            kind = "a tensor" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss returned {kind} without gradient. Compute it from the model's outputs, in torch")
        with deterministic_backward(self._deterministic, attention):
            # DDP and FSDP average gradients over ranks, but each rank's loss is a part of one sum.
            self._accelerator.backward(loss * self._accelerator.num_processes)
        return loss.detach()

    def _gradient_sync(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Choose when ranks reduce gradients: DDP and copies of FSDP once a step, FSDP shards in each micro-batch.

        Without a reduction in each micro-batch every FSDP rank would hold whole gradients.
        """
        if uses_deepspeed(self._accelerator):
            self._accelerator.sync_gradients = last
        if self._plan.parallel.dp_replicate_size > 1:
            assert isinstance(self._model, FSDPModule)  # only FSDP2 has copies of a sharded model
            # Reducing only over shards until the last micro-batch: else each rank holds its gradients twice.
            self._model.set_requires_all_reduce(last)
        if self._plan.strategy == "ddp" and not last:
            return self._accelerator.no_sync(self._model)
        return contextlib.nullcontext()

    def _update(self) -> Tensor | None:
        """Clip the gradients and step the optimizer; return the norm before clipping."""
        grad_norm = None
        max_norm = self._plan.optimizer.max_grad_norm
        if not uses_deepspeed(self._accelerator):  # DeepSpeed has stepped in the backward and freed the gradients
            check_gradients(self._optimizer)
        if max_norm > 0:
            # Listing parameters takes the host longer than launching the clipping, so list them once. FSDP2 shows
            # unsharded parameters before the first backward, so list them after it.
            self._parameters = self._parameters or tuple(self._model.parameters())
            grad_norm = clip_gradients(self._accelerator, self._optimizer, self._parameters, max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._float8 is not None:
            self._float8.update(partial(reduce_max, self._accelerator))
        return grad_norm


class EmbeddingNoise:
    """NEFTune (Jain et al. 2023): uniform noise on the input embeddings in training, none in evaluation.

        e + alpha / sqrt(T E) u,   u ~ U(-1, 1)        T tokens, E hidden size

    T is the length of the row, as in transformers' Trainer. In packed and padding-free rows it is the length of the
    token's own document, so that packing does not change the noise. The noise is drawn from torch's random state, like
    dropout: each rank has its own, and a checkpoint holds it. Noise is added inside of `of_batch` only.
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self._alpha = alpha
        self._is_on = False
        self._places = None
        embedding.register_forward_hook(self._add_noise)

    @contextlib.contextmanager
    def of_batch(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Add noise in the forward of a collator's batch. `document_places` (2, T) gives its documents, if any."""
        self._is_on = True
        self._places = batch.get("document_places")
        try:
            yield
        finally:
            self._is_on = False
            self._places = None

    def _add_noise(self, module: nn.Module, inputs: tuple[Tensor, ...], embedded: Tensor) -> Tensor | None:
        if not (self._is_on and module.training):
            return None
        if self._places is None:
            bound = self._alpha / (embedded.shape[1] * embedded.shape[2]) ** 0.5
            return embedded + torch.empty_like(embedded).uniform_(-bound, bound)
        begin, end = self._places
        bounds = self._alpha / ((end - begin) * embedded.shape[2]).float().sqrt()  # (T,)
        return embedded + torch.empty_like(embedded).uniform_(-1.0, 1.0) * bounds.to(embedded.dtype)[None, :, None]
