"""Rows of the embedding and the output head that train next to a LoRA adapter: PEFT's trainable tokens.

PEFT replaces the rows by a copy of the whole (V, E) weight in every forward, and its gradient is a (V, E) tensor. Here
the embedding looks the tokens up in the frozen weight and takes the trained rows where they belong:

    e_t = delta[place of x_t] if x_t trains, else W[x_t]

The output head still needs the whole weight and its gradient, but makes no logits: both enter `linear_cross_entropy`.
Also here: an embedding and a head that share their weight and train in full (`modules_to_save`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from ligertune_kernels import linear_cross_entropy
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from ligertune.any_types import AnyModule
from ligertune.errors import UserError
from ligertune.models.score_head import embedding_of, is_tied, lm_head_of
from ligertune.patching.deferred_logits import STATE, count_fused
from ligertune.patching.fused_loss import LossHead
from ligertune.patching.module_patch import ModulePatch, patch_module, unpatch_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.planning.options import MethodOptions

TokensLayer: TypeAlias = AnyModule  # PEFT's TrainableTokensLayer, or a patched class made of it


class TokenEmbedding(ModulePatch):
    """Mixin of PEFT's layer around the input embedding: (..., T) -> (..., T, E)."""

    def forward(self: TokensLayer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = _active(self)
        if name is None or args or kwargs or self.base_layer.max_norm is not None:
            return super().forward(x, *args, **kwargs)
        rows = self.base_layer(x)
        place = _lookup(self, name, x.device)[1][x]
        trained = F.embedding(place.clamp(min=0), self.trainable_tokens_delta[name]).to(rows.dtype)
        scale = self._get_embed_scale()
        trained = trained if scale is None else trained * scale.to(rows.dtype)
        return torch.where((place >= 0)[..., None], trained, rows)


class TokensLossHead(LossHead):
    """Mixin of PEFT's layer around the output head: (..., E) -> (..., V), or -> the loss if labels are passed."""

    def compute_loss(self: TokensLayer, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        base = self.base_layer
        name = _active(self)
        if type(base.weight) not in (Tensor, nn.Parameter):
            return self.dense_loss(hidden, labels, options, f"lm_head.weight is a {type(base.weight).__name__}")
        count_fused(self)
        weight = base.weight
        if name is not None:
            rows = self.trainable_tokens_delta[name].to(weight.dtype)
            weight = weight.index_copy(0, _lookup(self, name, weight.device)[0], rows)
        if STATE.head_loss is not None:
            return STATE.head_loss.fused(hidden, weight, None, labels, options)
        return linear_cross_entropy(hidden, weight, labels, None, **options)


class SavedEmbedding(ModulePatch):
    """Mixin of an embedding that trains in float32: its output (..., T, E) has the dtype of the frozen layers."""

    patch_spec: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs).to(self.patch_spec)


def trained_layers(model: PreTrainedModel, spec: MethodOptions) -> dict[str, Any]:
    """Return PEFT's `modules_to_save` and `ensure_weight_tying`. Of a tied weight, PEFT trains the embedding."""
    embedding = embedding_of(model)
    head = lm_head_of(model)
    tied = {_name_of(model, layer) for layer in (embedding, head)} if is_tied(model) else set()
    asked = {name for name in spec.lora_modules_to_save if _leaf(name) in map(_leaf, tied)}
    names = [name for name in spec.lora_modules_to_save if name not in asked]
    names += [_leaf(_name_of(model, embedding))] if asked else []
    return {"modules_to_save": names or None, "ensure_weight_tying": bool(asked)}


def token_layers(model: PreTrainedModel, spec: MethodOptions) -> dict[str, list[int]] | None:
    """Return PEFT's `trainable_token_indices`: layer name -> token ids, for the embedding and an untied head.

    Layers of `lora_modules_to_save` are left out, since all their rows train. Raises UserError.
    """
    ids = sorted({int(token) for token in spec.trainable_token_indices})
    embedding = embedding_of(model)
    head = lm_head_of(model)
    key = "method.trainable_token_indices"
    if not ids:
        return None
    if ids[-1] >= len(embedding.weight):
        raise UserError(f"{key}: {ids[-1]} is no token: the embedding has {len(embedding.weight)} rows.")
    if getattr(head, "bias", None) is not None:  # PEFT's forward leaves the bias out
        raise UserError(
            f"{key}: the output head of this model has a bias, which PEFT does not support.",
            hint="Write lora_modules_to_save with the names of embedding and output head instead.",
        )
    own_head = [] if head is None or is_tied(model) else [head]
    names = [_name_of(model, layer) for layer in (embedding, *own_head)]
    saved = {_leaf(name) for name in spec.lora_modules_to_save}
    if is_tied(model) and _leaf(_name_of(model, head)) in saved:
        return None
    return {name: ids for name in names if _leaf(name) not in saved} or None


def patch_token_rows(adapted: nn.Module) -> None:
    """Let trained rows and tied trained heads of an adapter use our loss, without copies of the embedding."""
    for module in list(adapted.modules()):
        if isinstance(module, TrainableTokensWrapper):
            _patch_tokens(module.token_adapter)
        elif isinstance(module, ModulesToSaveWrapper):
            _patch_tied(module)


def train_in_float32(adapted: nn.Module) -> None:
    """Make the layers of `modules_to_save` float32, as the adapters: in bfloat16 small updates are lost.

    FSDP2 trains them so in any case. Autocast computes their products in the dtype of the model.
    """
    for wrapper in adapted.modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        for layer in wrapper.modules_to_save.values():
            if isinstance(layer, nn.Embedding) and layer.weight.dtype != torch.float32:
                patch_module(layer, SavedEmbedding, layer.weight.dtype)
            layer.float()


def compute_in_dtype_of_base(adapted: nn.Module, dtype: torch.dtype) -> None:
    """Round the layers of `modules_to_save` to the dtype of their base, as PEFT does when it loads an adapter."""
    for wrapper in adapted.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for layer in wrapper.modules_to_save.values():
                layer.to(dtype)


def _patch_tokens(layer: TrainableTokensLayer) -> None:
    if isinstance(layer, ModulePatch):
        return
    if isinstance(layer.base_layer, nn.Embedding):
        patch_module(layer, TokenEmbedding)
    elif isinstance(layer.base_layer, LossHead):
        unpatch_module(layer.base_layer)
        patch_module(layer, TokensLossHead)


def _patch_tied(wrapper: ModulesToSaveWrapper) -> None:
    """Repair the head that PEFT makes for a tied weight: a plain nn.Linear whose sizes are swapped."""
    for module in wrapper.modules_to_save.values():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
            if isinstance(wrapper.original_module, LossHead) and not isinstance(module, ModulePatch):
                patch_module(module, LossHead)


def _lookup(layer: TokensLayer, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (ids of the trained tokens, place of each token among them or -1, (V,)).

    They are copied to the device once: a copy in each forward would wait for it, and no CUDA graph can hold one.
    """
    known = layer.__dict__.setdefault("_ligertune_lookup", {})
    ids = tuple(layer.token_indices[name])
    if (ids, device) not in known:
        indices = torch.tensor(ids, device=device)
        places = torch.full((len(layer.base_layer.weight),), -1, device=device)
        places[indices] = torch.arange(len(ids), device=device)
        known[ids, device] = indices, places
    return known[ids, device]


def _active(layer: TokensLayer) -> str | None:
    """Return the only active adapter; None if there is none, several, or if it is merged."""
    names = layer.active_adapters
    return names[0] if len(names) == 1 and not (layer.disable_adapters or layer.merged) else None


def _name_of(model: nn.Module, layer: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is layer)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
