"""Hidden states of the target that a draft head reads: those that enter the layers `layer_ids`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligertune.errors import UserError
from ligertune.models.shape import base_of, text_layers


class StateCapture:
    """Keeps the states that enter some layers in each forward of a model, until `close`. A context manager.

    `output_hidden_states` would keep those of all layers. Raises UserError for a model whose layers are not found.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        layers = text_layers(base_of(model))
        if layers is None:
            raise UserError(
                f"The decoder layers of this {type(model).__name__} are not found, so it has no draft head."
            )
        self._layer_ids = tuple(layer_ids)
        self._name = type(model).__name__
        self._found: dict[int, Tensor] = {}
        self._hooks = [layers[layer].register_forward_pre_hook(self._keep(layer), with_kwargs=True)
                       for layer in self._layer_ids]  # fmt: skip

    def _keep(self, layer: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._found[layer] = args[0] if args else options["hidden_states"]

        return keep

    def take(self) -> Tensor:
        """Return the states (B, T, 3E) of the last forward, concatenated by rising layer, and forget them."""
        found = torch.cat([self._found[layer] for layer in self._layer_ids], dim=-1)
        self._found.clear()
        return found

    def check(self, n_tokens: int, hidden_size: int) -> None:
        """Raise UserError unless the last forward, of one row, had states (1, n_tokens, hidden_size). Forget them."""
        for layer, state in self._found.items():
            if state.shape != (1, n_tokens, hidden_size):
                raise UserError(
                    f"Layer {layer} of this {self._name} reads states of shape {tuple(state.shape)} for {n_tokens} "
                    f"tokens, and a draft head one vector of {hidden_size} numbers for each token.",
                    hint="Such a model has no draft head.",
                )
        self._found.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> StateCapture:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
