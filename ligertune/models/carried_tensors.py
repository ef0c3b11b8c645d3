"""Tensors of a base model that its class does not load: find them, and write them unchanged next to trained weights.

Checkpoints hold more than transformers' model computes: layers that predict several tokens at once (`mtp.*`, or layers
behind the last one), further heads, towers of a model whose text part alone is trained. Programs that serve the
model read them, and end with an error where the configuration names them and the file lacks them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ligertune.errors import UserError, format_bytes, plural
from ligertune.files.base_model import CarriedTensors
from ligertune.files.model_files import (
    SAFE_INDEX,
    SAFE_WEIGHTS,
    ModelOrigin,
    hub_snapshot,
    loading,
    stored_shapes,
    weight_files,
)
from ligertune.models.score_head import embedding_rows, gives_scores, is_outside_backbone

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ligertune.planning.options import ModelOptions

COPY_BYTES = 16 << 20  # read and written at once
BASE = ModelOrigin("model.model_name_or_path", "write model.trust_remote_code: true")

# Buffers that older checkpoints hold, which models compute from their configuration, and scales of a quantised cache of
# keys and values, which training does not use. Nothing is lost without them.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|causal_mask|position_ids|attn\.[qkv]_scale)$")
_SEVERAL_TOKENS = re.compile(r"(^|\.)mtp(\.|_|$)")
_LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")
# Keys of config.json with the number of layers that predict several tokens: num_nextn_predict_layers (DeepSeek, GLM),
# num_mtp_layers, mtp_num_hidden_layers (Qwen3.5).
_NUMBER_OF_LAYERS = re.compile(r"^(?=.*(nextn|mtp))(num|n|mtp_num)_")


# ---- which tensors a model class leaves out


def is_separate(name: str, model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Return whether a tensor that a model does not load belongs to a part that the model does not have at all.

    Otherwise the model computes layers that the checkpoint describes in another way, and must not be trained.
    """
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    if _COMPUTED.search(name) or _SEVERAL_TOKENS.search(name) or any(re.search(pattern, name) for pattern in ignored):
        return True
    layer = _LAYER.search(name)
    text = config.get_text_config()
    if layer is not None and getattr(text, "num_nextn_predict_layers", None):
        return int(layer[1]) >= text.num_hidden_layers
    prefix = f"{model.base_model_prefix}."
    backbone = model.base_model
    part, _, rest = name.removeprefix(prefix).partition(".")
    is_tree = "." in rest if name.startswith(prefix) else bool(rest)  # model.x.weight would be a layer of the backbone
    return is_tree and not hasattr(model, part) and not hasattr(backbone, part)


def find_carried(
    spec: ModelOptions, config: PreTrainedConfig, model: PreTrainedModel, *, rows: int | None = None
) -> CarriedTensors | None:
    """Return the tensors of a base that `model` does not load; None if its files are not on this machine, or damaged.

    config: as it was read. model: of its class, without adapters; it may be on the meta device. rows: of the embedding
    that will be saved, if it is another one than the model's. Reads no weights.
    """
    if spec.init == "random":
        return CarriedTensors(dropped="its weights are random")
    try:
        stored = _stored(spec, config)
    except UserError:
        return None  # loading says what is wrong with the files
    if stored is None:
        return None
    names = [name for name in _unloaded(stored, model) if not _COMPUTED.search(name)]
    if getattr(config, "quantization_config", None) is not None:
        names = [name for name in names if not _describes_a_weight(name, model)]
    text = config.get_text_config()
    new_head = gives_scores(model.config)
    if new_head:  # a score head replaces the output head, and the configuration says so
        names = [n for n in names if not (is_outside_backbone(n, model) and stored[n].shape[:1] == (text.vocab_size,))]
    found = CarriedTensors(tuple(sorted(names)), sum(stored[name].n_bytes for name in names))
    rows = rows or embedding_rows(model)
    if getattr(config, "quantization_config", None) is not None and any(stored[n].is_quantised for n in names):
        return CarriedTensors(found.names, found.bytes, "they are quantised, and the saved weights are not")
    if rows != text.vocab_size and any(stored[name].shape[:1] == (text.vocab_size,) for name in names):
        return CarriedTensors(found.names, found.bytes, "they hold a row per token, and the vocabulary has grown")
    return found


def _unloaded(names: Collection[str], model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of a checkpoint that name no tensor of the model, after transformers' renaming."""
    transforms = get_model_conversion_mapping(model)
    expected = model.state_dict()
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    for name in names:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        plain, _ = rename_source_key(name, [], [], model.base_model_prefix, expected)
        if renamed not in expected and plain not in expected:
            yield name


def _describes_a_weight(name: str, model: nn.Module) -> bool:
    """Return whether a tensor of a quantised checkpoint belongs to a loaded layer: its scales, packed weights, ..."""
    path = re.sub(r"(\.weight)?\.[^.]+$|\.weight\.quant_state\..*", "", name)  # bitsandbytes stores weight.absmax
    modules = dict(model.named_modules())
    parents = (path, f"{model.base_model_prefix}.{path}", re.sub(r"\.experts\.\d+\..*", ".experts", path))
    return any(any(True for _ in modules[path].parameters(recurse=False)) for path in parents if path in modules)


def carried_note(carried: CarriedTensors, *, adapts: bool) -> str:
    """Return the note for plan, report and model card; empty if there is nothing to say. adapts: saves an adapter."""
    if not carried.names:
        return ""
    shown = ", ".join(carried.names[:3]) + (", ..." if len(carried.names) > 3 else "")
    what = f"{plural(len(carried.names), 'tensor')} of the base ({shown}; {format_bytes(carried.bytes)})"
    if carried.dropped:
        return f"{what} are not loaded, and not saved: {carried.dropped}; the saved config.json does not name them"
    if adapts:
        return f"{what} are not loaded; the adapter leaves them in the base, and `export` writes them unchanged"
    return f"{what} are not loaded; they are saved with the model unchanged"


# ---- the files of a base


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file. begin, end: its bytes in a safetensors file."""

    file: Path
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    n_bytes: int
    begin: int = 0
    end: int = 0

    @property
    def is_quantised(self) -> bool:
        return self.dtype.startswith(("F8", "F4", "I", "U"))


def _stored(spec: ModelOptions, config: PreTrainedConfig | None = None) -> dict[str, StoredTensor] | None:
    """Return the tensors of a base by name; None if its files are not here. Raises UserError for damaged files."""
    path = Path(spec.model_name_or_path).expanduser()
    folder = path if path.is_dir() else hub_snapshot(spec.model_name_or_path, spec.revision)
    if folder is None:
        return None
    explicit = getattr(config, "transformers_weights", None)
    stored_shapes(folder, BASE, explicit=explicit)  # checks that safetensors files are complete
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder, BASE, explicit=explicit):
        found |= tensors_in_safetensors(file) if file.suffix == ".safetensors" else _in_pickle(file)
    return found


def tensors_in_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, from its header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, values in header.items():
        begin, end = (8 + length + offset for offset in values["data_offsets"])
        found[name] = StoredTensor(file, values["dtype"], tuple(values["shape"]), end - begin, begin, end)
    return found


def _in_pickle(file: Path) -> dict[str, StoredTensor]:
    with loading(BASE, f"{file} cannot be read"):
        tensors = torch.load(file, map_location="meta", weights_only=True).items()  # no weights, and none of its code
    kinds = {torch.float8_e4m3fn: "F8", torch.int8: "I8", torch.uint8: "U8"}
    return {
        name: StoredTensor(file, kinds.get(t.dtype, "F"), tuple(t.shape), t.numel() * t.element_size())
        for name, t in tensors
        if isinstance(t, torch.Tensor)
    }


# ---- writing


def add_carried(folder: Path, spec: ModelOptions, carried: CarriedTensors) -> UserError | None:
    """Add the tensors to a saved model as further shards, or let its config.json not name them.

    Return an error if the base's files are not those that were planned with: the model is complete without them.
    """
    if carried.dropped or not carried.names:
        if carried.dropped:
            forget_layers(folder / "config.json")
        return None
    try:
        stored = _stored(spec) or {}
    except UserError:
        stored = {}
    places = {name: stored[name] for name in carried.names if name in stored}
    if len(places) < len(carried.names) or sum(place.n_bytes for place in places.values()) != carried.bytes:
        forget_layers(folder / "config.json")
        return UserError(
            f"{spec.model_name_or_path} no longer holds the {plural(len(carried.names), 'tensor')} that its class does"
            f" not load ({carried.names[0]}, ...), so the saved model lacks them; its config.json does not name them.",
            hint="Put back the base's files, and continue the run with --resume to write the model again.",
            exit_code=1,
        )
    _add_shards(folder, places)
    return None


def forget_layers(config: Path) -> None:
    """Set the number of layers that predict several tokens to 0 in a config.json, also within its parts."""

    def without(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: without(value)
            if isinstance(value, dict)
            else 0
            if type(value) is int and _NUMBER_OF_LAYERS.search(key)
            else value
            for key, value in values.items()
        }

    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(without(values), indent=2) + "\n", encoding="utf-8")


def _add_shards(folder: Path, places: dict[str, StoredTensor]) -> None:
    """Copy tensors into new shards of a saved model, one for each file that holds some, and write its index."""
    index = _index_of(folder)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in sorted(places, key=lambda name: places[name].begin):
        if name not in index["weight_map"]:  # the trained tensor of this name stays
            by_file[places[name].file].append(name)
    old = sorted(set(index["weight_map"].values()))
    total = len(old) + len(by_file)
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    renamed = dict(zip(old, names, strict=False))
    for before, after in renamed.items():
        os.replace(folder / before, folder / after)
    shard_of = {name: renamed[shard] for name, shard in index["weight_map"].items()}
    for shard, (file, chosen) in zip(names[len(old) :], by_file.items(), strict=True):
        _copy(file, {name: places[name] for name in chosen}, folder / shard)
        shard_of |= dict.fromkeys(chosen, shard)
    metadata = index["metadata"]
    copied = [places[name] for chosen in by_file.values() for name in chosen]
    metadata["total_size"] = metadata.get("total_size", 0) + sum(place.n_bytes for place in copied)
    if "total_parameters" in metadata:
        metadata["total_parameters"] += sum(math.prod(place.shape) for place in copied)
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(shard_of.items()))}, indent=2)
    (folder / SAFE_INDEX).write_text(text + "\n", encoding="utf-8")


def _index_of(folder: Path) -> dict[str, Any]:
    """Return the index of a saved model, also of one with a single file."""
    if (folder / SAFE_INDEX).is_file():
        return json.loads((folder / SAFE_INDEX).read_text(encoding="utf-8"))
    stored = tensors_in_safetensors(folder / SAFE_WEIGHTS)
    size = sum(place.n_bytes for place in stored.values())
    return {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(stored, SAFE_WEIGHTS)}


def _copy(file: Path, places: dict[str, StoredTensor], target: Path) -> None:
    """Write tensors of a weight file into a new safetensors file, byte by byte, without holding them in memory."""
    if file.suffix != ".safetensors":
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        save_file({name: tensors[name].clone().contiguous() for name in places}, target, {"format": "pt"})
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, place in places.items():
        offsets = [offset, offset + place.n_bytes]
        header[name] = {"dtype": place.dtype, "shape": list(place.shape), "data_offsets": offsets}
        offset += place.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the data to 8 bytes
    with file.open("rb") as source, target.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for place in places.values():
            source.seek(place.begin)
            left = place.n_bytes
            while left:
                chunk = source.read(min(left, COPY_BYTES))
                if not chunk:
                    raise UserError(f"{file} ends before the tensors that its header names.", exit_code=1)
                written.write(chunk)
                left -= len(chunk)
