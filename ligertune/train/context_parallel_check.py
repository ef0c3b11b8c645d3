"""Whether the parts of a row give what the whole row does, asked of the model on its device before anything is trained.

One that looked for its labels or its documents elsewhere than others do would be trained on something else, and tell
nobody.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ligertune.data.batching.batcher import Batcher
from ligertune.data.batching.collate import collate_packed
from ligertune.data.examples import Example
from ligertune.errors import UserError
from ligertune.planning.plan import Plan
from ligertune.train.distributed import after_evaluation

# Of the size of what is compared, logits and loss. Attention adds up in another order, which bfloat16 rounds; of a loss
# at least one label in T / C would be missing, 3 %.
EXACT, ROUNDED = (1e-4, 1e-4), (3e-2, 5e-3)


def check_parts(plan: Plan, model: nn.Module, batcher: Batcher, *, vocab_size: int) -> None:
    """A UserError where they do not. All ranks call it, after a checkpoint is loaded."""
    if batcher.parts is None:
        return
    logits, loss = parts_from_whole(model, batcher, vocab_size=vocab_size)
    after_evaluation(model)
    exact = not plan.precision.half
    most = EXACT if exact else ROUNDED
    if not (logits <= most[0] and loss <= most[1]):
        raise UserError(
            f"parallel.cp_size: a part of a row does not give what the whole row does in this {plan.model_family} "
            f"(logits differ by {logits:.1e}, the loss by {loss:.1e}).",
            hint="Leave it out.",
        )


def parts_from_whole(model: nn.Module, batcher: Batcher, *, vocab_size: int) -> tuple[float, float]:
    """How far this rank's logits, and the loss of all, are from the whole row's: shares of how large those are."""
    length = 2 * batcher.multiple_of
    tokens = np.random.default_rng(0).integers(vocab_size, size=length)
    cut = length // 3  # a document that lies in several parts, and one in most
    examples = [Example(ids, ids, "") for ids in (tokens[:cut], tokens[cut:])]
    whole = collate_packed(examples, pad_token_id=batcher.pad_token_id)
    was_training, found = model.training, []
    model.eval()
    with torch.no_grad():
        for batch in (whole, batcher.parts.cut(whole)):
            tensors = {k: v.to(batcher.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            made = model(**tensors, num_items_in_batch=length, use_cache=False)
            found.append((made.logits[0].float(), made.loss.float()))
    model.train(was_training)
    (logits, loss), (part_logits, part_loss) = found
    dist.all_reduce(part_loss, group=batcher.parts.group)
    own = logits[batcher.parts.tokens(length).to(batcher.device)]
    moved = torch.linalg.vector_norm(part_logits - own) / torch.linalg.vector_norm(own)
    return float(moved), float((part_loss - loss).abs() / loss)
