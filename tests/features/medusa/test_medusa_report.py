"""Head accuracy by rank, against ranks counted one by one."""

import numpy as np
import torch
from support.models.tiny_models import VOCAB, make

from ligertune.data.examples import Example
from ligertune.features.medusa.medusa_model import attach_heads
from ligertune.features.medusa.medusa_report import RANKS, head_accuracy
from ligertune.features.medusa.recipe import MedusaSpec


def test_head_accuracy_is_the_share_of_targets_by_rank():
    """Head k (from 1) predicts the token k + 1 positions ahead; the prompt of four tokens is not trained."""
    torch.manual_seed(0)
    model = attach_heads(make("llama"), MedusaSpec(num_heads=2, lm_head="own"), fused=True)
    for parameter in model.medusa_head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    rows = np.random.default_rng(0).integers(3, VOCAB, (8, 40), dtype=np.int32)
    labels = rows.copy()
    labels[:, :4] = -100
    accuracy = head_accuracy(model, [Example(*pair, "") for pair in zip(rows, labels, strict=True)])
    counts = torch.zeros(2, VOCAB)
    with torch.no_grad():
        for ids in torch.from_numpy(rows).long():
            hidden = model.last_hidden_state(ids[None], use_cache=False)[0]
            for k, head in enumerate(model.medusa_head):
                for position in range(2 - k, len(ids) - k - 2):
                    order = head(hidden[position]).argsort(descending=True).tolist()
                    counts[k, order.index(int(ids[position + k + 2]))] += 1
    torch.testing.assert_close(torch.tensor(accuracy), (counts / counts.sum(1, keepdim=True))[:, :RANKS])
