"""The training step of an EAGLE-3 head in plain PyTorch, which materialises the scores of all pairs of rows.

At step k the scores are (H, T, T + k): causal ones to the keys of step 0, masked to a row's document, and one to each
key of the row's own later steps. The logits of target and head exist for all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ligertune.models.score_head import embedding_of, lm_head_of

if TYPE_CHECKING:
    from torch import Tensor

    from ligertune.features.draft.draft_head import DraftHead
    from ligertune.features.draft.training.draft_model import DraftModel


def plain_draft_loss(model: DraftModel, batch: dict[str, Any]) -> Tensor:
    """Return the loss `eagle` of one packed row (1, T), as DraftModel computes it with its kernels."""
    inputs = {name: batch[name] for name in batch if name not in ("labels", "labelled_rows")}
    states, last = model.target_states(**inputs, use_cache=False)
    head = model.draft_head
    starts = batch["document_places"][0]
    labels = batch["labels"][0]
    teacher = F.linear(last, lm_head_of(model.base_model).weight).float()
    drafted = head.draft_ids()
    p = teacher[:, drafted].softmax(-1)
    counted_rows = teacher[:, drafted].amax(-1) == teacher.amax(-1)
    predicts = F.pad(labels[1:] != -100, (0, 1))
    rows = torch.arange(len(last), device=last.device)
    hidden_pairs = (rows > rows[:, None]) | (rows < starts[:, None])
    embedding = embedding_of(model.base_model).weight
    hidden = head.combine(states)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    loss = last.new_zeros((), dtype=torch.float32)
    for step in range(model.spec.steps):
        embedded = F.embedding(torch.roll(batch["input_ids"][0], -1 - step), embedding)
        hidden = _layer(head, hidden, embedded, batch["position_ids"][0] + step, hidden_pairs, keys, values)
        log_q = F.linear(_norm(hidden, head.norm), head.lm_head.weight).float().log_softmax(-1)
        teacher_rows = (rows + step + 1).clamp(max=len(rows) - 1)
        is_in_document = (rows >= starts[teacher_rows]) & (rows + step + 1 < len(rows))
        labelled = is_in_document & predicts[teacher_rows]
        per_row = -(p[teacher_rows] * log_q).sum(-1)
        trained = per_row.where(labelled & counted_rows[teacher_rows], 0.0)
        loss = loss + model.spec.decay_coefficient**step * trained.sum() / labelled.sum().clamp(min=1)
    return loss


def _layer(
    head: DraftHead,
    hidden: Tensor,  # (T, E)
    embedded: Tensor,  # (T, E)
    positions: Tensor,  # (T,)
    hidden_pairs: Tensor,  # (T, T) bool: pairs that do not attend
    keys: list[Tensor],  # of the steps before, (H, T, D) each; this step's are added
    values: list[Tensor],
) -> Tensor:  # (T, E)
    layer = head.midlayer
    attention = layer.self_attn
    inputs = torch.cat([_norm(embedded, layer.input_layernorm), _norm(hidden, layer.hidden_norm)], dim=-1)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (one(inputs).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1) for one in projections)
    cos, sin = head.rope(positions, query.dtype)
    query = query * cos + _rotate_half(query) * sin
    key = key * cos + _rotate_half(key) * sin
    group = len(query) // len(key)
    keys.append(key.repeat_interleave(group, 0))
    values.append(value.repeat_interleave(group, 0))
    scale = layer.head_dim**-0.5
    first = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(hidden_pairs, float("-inf"))
    own = [(query * own_key).sum(-1, keepdim=True) * scale for own_key in keys[1:]]
    weights = torch.cat([first, *own], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
    attended = weights[..., : len(hidden)] @ values[0]
    for place, own_value in enumerate(values[1:]):
        attended = attended + weights[..., len(hidden) + place, None] * own_value
    hidden = hidden + attention.o_proj(attended.transpose(0, 1).flatten(1))
    normed = _norm(hidden, layer.post_attention_layernorm)
    mlp = layer.mlp
    return hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def _norm(hidden: Tensor, norm: Any) -> Tensor:
    """Return RMSNorm as transformers computes it."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * normed.to(hidden.dtype)


def _rotate_half(values: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
