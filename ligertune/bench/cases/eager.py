"""What an unpatched transformers model runs, op by op: the models' own modules and functions, for `bench`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

Tensors = tuple[torch.Tensor, ...]


def rms_norm(weight: torch.Tensor) -> nn.Module:
    """Llama's norm over this weight (E,)."""
    norm = LlamaRMSNorm(weight.shape[0])
    norm.weight = weight
    return norm


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    """Llama's, of q (B, H, T, D) and k (B, K, T, D)."""
    return apply_rotary_pos_emb(q, k, cos, sin)


def gated(activation: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What stands between the projections of a gated MLP: "silu" in Llama's, "gelu_pytorch_tanh" in Gemma's."""
    act = ACT2FN[activation]
    return lambda gate, up: act(gate) * up


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of every causal language model, of logits (N, V) and labels (N,) that are already shifted."""
    return ForCausalLMLoss(logits, None, logits.shape[-1], shift_labels=labels)
