"""The loss over an evaluation set: mean over its trained tokens, whatever the batch size or the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from ligertune_kernels import labelled_rows

from ligertune.data.batches import collate
from ligertune.model.deferred import loss_only
from ligertune.train.distributed import after_evaluation, reduce_sum

if TYPE_CHECKING:
    from torch import nn

    from ligertune.data.prepare import Examples

# Matrix products like rows in multiples of 16: 2 % more tokens/s on an H100, padding and all.
PAD_TO_MULTIPLE_OF = 16
# Few sizes of the head's products: cuBLAS and the allocator take their time over each that is new.
ROWS_MULTIPLE_OF = 128


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    examples: Examples,
    *,
    batch_size: int,
    pad_token_id: int,
    index_labels: bool,
) -> float:
    """Mean loss of `examples`. All ranks call it; each does its slices, and none makes logits it does not need."""
    n_targets = int(target_counts(examples).sum())
    rank, world = accelerator.process_index, accelerator.num_processes
    total = torch.zeros((), device=accelerator.device, dtype=torch.float32)
    model.eval()
    with torch.no_grad(), loss_only():
        for start in range(0, len(examples), batch_size * world):
            mine = np.arange(start, start + batch_size * world)[rank * batch_size : (rank + 1) * batch_size]
            batch = micro_batch(
                examples, mine[mine < len(examples)], pad_token_id, accelerator.device, index_labels=index_labels
            )
            total += model(**batch, num_items_in_batch=n_targets, use_cache=False).loss.float()
    model.train()
    after_evaluation(model)
    return float(reduce_sum(accelerator, total))


def micro_batch(
    examples: Examples, indices: np.ndarray, pad_token_id: int, device: torch.device, *, index_labels: bool
) -> dict[str, torch.Tensor]:
    """Examples on the device: input_ids and labels, (B, T), padded on the right; with `index_labels` also the rows that
    predict a label, for a loss that is computed in the head.

    There is no attention mask: padding stands behind every real token, where causal attention does not look, and
    without a mask the flash kernels stay available. A rank without examples gets one of which nothing is trained, so
    that all ranks make the same collective calls.
    """
    idle = len(indices) == 0
    chosen = [examples[int(i)] for i in (indices if not idle else [0])]
    batch = collate(chosen, pad_token_id=pad_token_id, pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    labels = torch.full_like(batch["labels"], -100) if idle else batch["labels"]
    tensors = {"input_ids": batch["input_ids"], "labels": labels}
    if index_labels:
        tensors["labelled_rows"] = labelled_rows(labels, shift=1, multiple_of=ROWS_MULTIPLE_OF)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def target_counts(examples: Examples) -> np.ndarray:
    """How many targets each example has: trained labels but the first, which nothing predicts."""
    return np.array([int((example.labels[1:] != -100).sum()) for example in examples], dtype=np.int64)
