"""The cache of a fixed number of texts that grow side by side, in which a finished text is replaced by another.

S slots, C capacity: the most tokens of a text. Text s holds columns [0, positions[s]] of its slot, so the column of a
token is its position, and the masks that transformers defines by positions hold without change. All shapes are static.
Sliding layers keep all columns too, and mask those outside of the window.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.masking_utils import create_masks_for_generate

from ligertune.any_types import AnyModule
from ligertune.decode.answers.slot_attention import SLOTS, NoSlotsError

_HYBRIDS = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


def cache_keyword(base: AnyModule) -> str:
    """Return the keyword of a model's cache. transformers 5.24 renamed past_key_values to cache."""
    # a patched class wraps the original's forward
    forwards = [vars(cls)["forward"] for cls in type(base).__mro__ if "forward" in vars(cls)]
    renamed = any("cache" in inspect.signature(forward).parameters for forward in forwards)
    return "cache" if renamed else "past_key_values"


def prefix_cache(base: AnyModule) -> Cache:
    """Return an empty cache that keeps the keys of all tokens. Raises NoSlotsError."""
    cache = DynamicCache(config=base.config)
    cache.layers = [_unlimited(layer) for layer in cache.layers]
    return cache


def _unlimited(layer: Any) -> Any:
    """Return a new layer without a sliding window: a window of padded rows would end in their padding."""
    kind = type(layer)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer):
        return DynamicLayer()
    if kind in _HYBRIDS:
        return LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    # DummyLayer: of layers that read another layer's keys; transformers 5.17 has none
    if kind is LinearAttentionLayer or kind.__name__ == "DummyLayer":
        return layer
    raise NoSlotsError(f"{kind.__name__} is a cache of another kind")


def has_recurrent_states(cache: Cache) -> bool:
    """Return whether a layer has a state that padding would change."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)


class _SlotKeys(CacheLayerMixin):
    """Keys and values (S, K, C, D) of a layer. A forward adds one token to each slot, at the slot's position."""

    is_sliding = False
    keys: Any  # tensors from the start, where transformers' layers begin with None
    values: Any

    def __init__(self, like: Any, slots: int, capacity: int, positions: Tensor) -> None:
        CacheLayerMixin.__init__(self)
        self.capacity = capacity
        self.positions = positions
        self.rows = torch.arange(slots, device=positions.device)
        self.keys = _slots_like(like.keys, slots, capacity)
        self.values = _slots_like(like.values, slots, capacity)
        self.is_initialized = True

    def lazy_initialization(self, *states: Any, **options: Any) -> None:
        raise NotImplementedError("slots are allocated before the first forward")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store one token of each slot (S, K, 1, D), and return the keys and values of all columns."""
        # in place: a CUDA graph writes to the addresses of its recording
        self.keys[self.rows, :, self.positions] = key_states[:, :, 0]
        self.values[self.rows, :, self.positions] = value_states[:, :, 0]
        return self.keys, self.values

    def fill(self, like: Any, sources: Tensor, slots: Tensor) -> None:
        """Copy rows of a prefix's keys into slots. Columns beyond a row's prefix hold padding, which is masked."""
        n_columns = like.keys.shape[2]
        self.keys[slots, :, :n_columns] = like.keys[sources]
        self.values[slots, :, :n_columns] = like.values[sources]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> int:
        return self.capacity - 1

    def get_max_length(self) -> int:
        return self.capacity


class _SlotStates(LinearAttentionLayer):
    """States of a recurrent layer. A forward changes the states of all slots."""

    def __init__(self, like: Any, slots: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=like.number_of_states)
        # with the flags of a layer that has run; dicts are copied because their states are replaced below
        for name, value in vars(like).items():
            if name not in ("keys", "values"):
                setattr(self, name, copy.copy(value))
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = _slots_like(state, slots)

    def fill_states(self, like: Any, sources: Tensor, slots: Tensor) -> None:
        """Copy the states of a prefix's rows into slots; without a prefix they become 0."""
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(self, name).items():
                if state is not None:
                    state[slots] = 0 if like is None else getattr(like, name)[index][sources]


class _SlotHybrid(_SlotStates, _SlotKeys):
    """A layer with both."""

    is_compileable = False  # transformers' two bases disagree
    is_croppable = False

    def __init__(self, like: Any, slots: int, capacity: int, positions: Tensor) -> None:
        _SlotStates.__init__(self, like, slots)
        _SlotKeys.__init__(self, like, slots, capacity, positions)

    def lazy_initialization(self, *states: Any, **options: Any) -> None:
        raise NotImplementedError("slots are allocated before the first forward")


def _slots_like(row: Tensor, slots: int, capacity: int | None = None) -> Tensor:
    shape = [slots, *row.shape[1:]]
    if capacity is not None:
        shape[2] = capacity
    return torch.zeros(shape, dtype=row.dtype, device=row.device)


class SlotCache:
    """A cache of S slots for a model of transformers, with the masks of its attention.

    like: a cache of `prefix_cache` after a forward, for the shapes. positions (S,): of the token that comes next in
    each slot; the caller changes it in place.
    """

    def __init__(self, base: AnyModule, like: Cache, *, capacity: int, positions: Tensor) -> None:
        self.cache = DynamicCache(config=base.config)
        self.cache.layers = [_slot_layer(layer, capacity, positions) for layer in like.layers]
        self._keyword = cache_keyword(base)
        self._make_masks: Callable[..., Any] = getattr(base, "create_masks_for_generate", create_masks_for_generate)
        self._inputs = torch.empty(len(positions), 1, 0, dtype=base.dtype, device=positions.device)
        # the function that makes masks is named by the configuration, so masks are made with a copy of it
        self._config = copy.copy(base.config.get_text_config())
        self._config.slot_positions = positions
        self._config.slot_masks = base.config._attn_implementation
        self._config._attn_implementation = SLOTS

    def fill(self, prefix: Cache | None, sources: Sequence[int], slots: Sequence[int]) -> None:
        """Copy rows `sources` of a prefix into slots. prefix None: texts without one."""
        device = self._inputs.device
        rows = torch.tensor(sources, device=device)
        places = torch.tensor(slots, device=device)
        for index, layer in enumerate(self.cache.layers):
            like = None if prefix is None else prefix.layers[index]
            if isinstance(layer, _SlotKeys) and like is not None:
                layer.fill(like, rows, places)
            if isinstance(layer, _SlotStates):
                layer.fill_states(like, rows, places)

    def inputs(self) -> Mapping[str, Any]:
        """Return the cache and the masks as keywords of the model's forward, for the present positions."""
        masks = None
        cached = {self._keyword: self.cache}
        if any(isinstance(layer, _SlotKeys) for layer in self.cache.layers):
            masks = self._make_masks(
                config=self._config, inputs_embeds=self._inputs, attention_mask=None, position_ids=None, **cached
            )
        keywords = {"attention_mask": masks, "use_cache": True, **cached}
        if hasattr(self._config, "output_router_logits"):
            keywords["output_router_logits"] = False  # the loss of a router wants a mask of padding
        return keywords


def _slot_layer(like: Any, capacity: int, positions: Tensor) -> Any:
    slots = len(positions)
    if isinstance(like, LinearAttentionAndFullAttentionLayer):
        return _SlotHybrid(like, slots, capacity, positions)
    if isinstance(like, LinearAttentionLayer):
        return _SlotStates(like, slots)
    return _SlotKeys(like, slots, capacity, positions) if isinstance(like, DynamicLayer) else like


def bytes_per_slot(like: Cache, capacity: int) -> int:
    """Return the bytes of a slot. like: a cache after a forward, for the shapes."""
    total = 0
    layers: Sequence[Any] = like.layers
    for layer in layers:
        if isinstance(layer, DynamicLayer):
            columns: tuple[Any, Any] = (layer.keys, layer.values)
            total += capacity * sum(one[0, :, 0].nbytes for one in columns)
        if isinstance(layer, LinearAttentionLayer):
            for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                total += 0 if state is None else state[:1].nbytes
    return total
