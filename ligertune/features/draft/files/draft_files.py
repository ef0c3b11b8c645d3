"""Files of a draft head, `config.json` and `model.safetensors`, in the two layouts that servers load.

    eagle3          names of EAGLE-3 (`midlayer.`), architecture LlamaForCausalLMEagle3: SGLang, vLLM, llama.cpp,
                    TensorRT-LLM
    speculators     names of the package speculators (`layers.0.`) and the target's embedding: vLLM

Layer ids count as in vLLM: layer i is captured by the state that enters it, so 0 is the embedding. SGLang counts
outputs, and reads ids from `eagle_config`: it needs them only where they are not its default. Servers skip keys that
they do not know and assume what is missing, so files that differ from these layouts are refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ligertune.features.draft.draft_config import (
    NUM_STATES,
    DraftConfig,
    check_layer_ids,
    default_layer_ids,
    rope_parameters_of,
    server_layer_ids,
)
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.files.draft_card import Layout, draft_card
from ligertune.files.model_files import SAFE_WEIGHTS, ModelOrigin, check_sizes, loading, read_json, shapes_in
from ligertune.files.storage import new_folder, write_text
from ligertune.models.read_config import config_value
from ligertune.models.shape import depth_of

LAYOUTS: tuple[Layout, ...] = ("eagle3", "speculators")
CONFIG = "config.json"
CARD = "README.md"
SPECULATORS_VERSION = "0.9.0"  # whose files these are
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
TABLES = ("d2t", "t2d")
DRAFT_HEAD = ModelOrigin("draft head", "use another head")
# Options of heads that are no plain EAGLE-3; the last two were ignored silently by servers until mid 2026.
OTHER_HEADS = ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias", "fc_norm", "norm_output")
MAX_LAYERS = 64  # published heads have one
NEEDED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
# Keys that describe a layer; others, such as those of a whole model, are not read.
LAYER_KEYS = (
    *NEEDED_KEYS, "num_key_value_heads", "head_dim", "num_hidden_layers", "rms_norm_eps", "rope_parameters",
    "rope_theta", "rope_scaling",
)  # fmt: skip


@dataclass(frozen=True)
class DraftTarget:
    """The model that a head drafts for. name: its folder or hub id. embedding (V, E): its input embedding."""

    name: str
    config: PreTrainedConfig
    embedding: Tensor


@dataclass(frozen=True)
class DraftFiles:
    """What a folder holds, checked against its own configuration. trained_ids: the layer ids in the weight file."""

    folder: Path
    layout: Layout
    config: DraftConfig
    tensors: Mapping[str, Tensor]  # by the names of DraftHead
    embedding: Tensor | None  # (V, E)
    trained_ids: tuple[int, ...] | None

    def head(self) -> DraftHead:
        """Return the head in host memory, in the dtype of its files."""
        head = DraftHead(self.config).to(self.tensors["fc.weight"].dtype)
        head.load_state_dict(dict(self.tensors))
        return head


# ---- write


def write_draft_head(
    head: DraftHead,
    folder: Path,
    target: DraftTarget,
    *,
    layout: Layout,
    speculative_tokens: int,
    training: Sequence[tuple[str, str]] = (),
) -> None:
    """Write a head in one layout, with README.md; `folder` appears only when complete.

    speculative_tokens: how many tokens a server drafts at a time, which `speculators` files say. training: rows of
    README.md on the training.
    """
    tensors = {name: one.detach().to("cpu").contiguous() for name, one in head.state_dict().items()}
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
        embedding = target.embedding.detach().to("cpu", head.fc.weight.dtype)
        tensors[EMBEDDING] = embedding.contiguous()
        config = _speculators_config(head, target, speculative_tokens)
    else:
        config = _eagle3_config(head, target)
    metadata = {"format": "pt", "layer_ids": json.dumps(head.config.layer_ids), "target": target.name}
    with new_folder(folder) as aside:
        save_file(tensors, aside / SAFE_WEIGHTS, metadata=metadata)
        write_text(aside / CONFIG, json.dumps(config, indent=2) + "\n")
        card = draft_card(
            head.config,
            folder.name,
            target.name,
            layout=layout,
            speculative_tokens=speculative_tokens,
            training=training,
        )
        write_text(aside / CARD, card)


def _layer_values(config: DraftConfig) -> dict[str, Any]:
    """Return the keys of a Llama configuration, with the rotary embeddings as transformers 4 and 5 read them."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _eagle3_config(head: DraftHead, target: DraftTarget) -> dict[str, Any]:
    config = head.config
    text = target.config.get_text_config()
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_values(config),
        "draft_vocab_size": config.draft_vocab_size,
        LAYER_IDS: list(config.layer_ids),
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "torch_dtype": _dtype_name(head),
    }
    if config.layer_ids != server_layer_ids(config.target_layers):
        outputs = [layer - 1 for layer in config.layer_ids]
        values["eagle_config"] = {LAYER_IDS: outputs, "use_aux_hidden_state": True}
    return values


def _speculators_config(head: DraftHead, target: DraftTarget, speculative_tokens: int) -> dict[str, Any]:
    config = head.config
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": _layer_values(config),
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        LAYER_IDS: list(config.layer_ids),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target.name, "architectures": list(target.config.architectures or ())},
        },
        "tie_word_embeddings": False,
        "torch_dtype": _dtype_name(head),
    }


def _dtype_name(head: DraftHead) -> str:
    return str(head.fc.weight.dtype).removeprefix("torch.")


# ---- read


def head_folder(name: str) -> Path:
    """Return the folder of a draft head: the named one, or that of one layout in a run or its folder draft/."""
    folder = Path(name).expanduser()
    folder = folder / "draft" if (folder / "draft").is_dir() else folder
    return next((folder / layout for layout in LAYOUTS if (folder / layout).is_dir()), folder)


def read_draft_head(folder: Path, target: PreTrainedConfig) -> DraftHead:
    """Load a head in host memory, in either layout. Raises UserError for files that are no head of the target."""
    return read_draft_files(folder, target).head()


def read_draft_files(folder: Path, target: PreTrainedConfig) -> DraftFiles:
    """Read a folder in either layout. Raises UserError for anything else, and for a head of another target."""
    path = folder / CONFIG
    if not path.is_file() or not (folder / SAFE_WEIGHTS).is_file():
        raise DRAFT_HEAD.error(f"{folder} holds no draft head ({CONFIG} and {SAFE_WEIGHTS}).")
    values = read_json(path, DRAFT_HEAD)
    layout, layer_values = _layout_of(values, path)
    check_sizes(layer_values, path, DRAFT_HEAD)
    config = _read_config(values, layer_values, target, path)
    _check_target(config, target, folder)
    weights = folder / SAFE_WEIGHTS
    renamed = {"layers.0.": "midlayer."} if layout == "speculators" else {}
    _check_shapes(config, _as_in_head(shapes_in(weights, DRAFT_HEAD), renamed), weights)
    with loading(DRAFT_HEAD, f"{weights} cannot be read"):
        tensors = _as_in_head(load_file(weights), renamed)
    embedding = tensors.pop(EMBEDDING, None)
    if config.reduces_vocabulary:
        _check_tables(config, tensors["d2t"], tensors["t2d"], weights)
    return DraftFiles(folder, layout, config, tensors, embedding, _trained_ids(weights))


def _layout_of(values: dict[str, Any], path: Path) -> tuple[Layout, dict[str, Any]]:
    """Return the layout and the keys of the layers."""
    if values.get("speculators_model_type") == "eagle3":
        layers = values.get("transformer_layer_config")
        if not isinstance(layers, dict):
            raise DRAFT_HEAD.error(f"{path} lacks transformer_layer_config, the sizes of the layers.")
        return "speculators", layers
    if values.get("architectures") == ["LlamaForCausalLMEagle3"]:
        return "eagle3", values
    raise DRAFT_HEAD.error(
        f"{path} describes no EAGLE-3 head.",
        hint="It must have architectures: [LlamaForCausalLMEagle3], or speculators_model_type: eagle3.",
    )


def _read_config(
    values: dict[str, Any], layer_values: dict[str, Any], target: PreTrainedConfig, path: Path
) -> DraftConfig:
    """Return the sizes of the head. Raises UserError for options of other heads, and for keys that are missing."""
    _check_keys(values, layer_values, path)
    known = {name: layer_values[name] for name in LAYER_KEYS if layer_values.get(name) is not None}
    with loading(DRAFT_HEAD, f"{path} cannot be used"):
        llama = AutoConfig.for_model("llama", **known)
        rope = rope_parameters_of(llama)
    depth = depth_of(target.get_text_config())
    layer_ids = tuple(values.get(LAYER_IDS) or default_layer_ids(depth))
    return DraftConfig(
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=llama.max_position_embeddings,
        vocab_size=llama.vocab_size,
        draft_vocab_size=values["draft_vocab_size"],
        layer_ids=check_layer_ids(layer_ids, depth, key=f"{path}: {LAYER_IDS}"),
        target_layers=depth,
        num_layers=llama.num_hidden_layers,
    )


def _check_keys(values: dict[str, Any], layer_values: dict[str, Any], path: Path) -> None:
    others = [name for name in OTHER_HEADS if values.get(name) or layer_values.get(name)]
    if layer_values.get("hidden_act", "silu") != "silu":
        others.append("hidden_act")
    if others:
        raise DRAFT_HEAD.error(f"{path}: {others[0]} is set, and plain EAGLE-3 heads do not have it.")
    missing = [name for name in NEEDED_KEYS if layer_values.get(name) is None]
    if missing:
        raise DRAFT_HEAD.error(f"{path} lacks {missing[0]}.")
    layers = layer_values.get("num_hidden_layers", 1)
    if layers not in range(1, MAX_LAYERS + 1):
        raise DRAFT_HEAD.error(f"{path}: num_hidden_layers is {layers}, and must be from 1 to {MAX_LAYERS}.")
    size = values.get("draft_vocab_size")
    if type(size) is not int or not 0 < size <= layer_values["vocab_size"]:
        raise DRAFT_HEAD.error(
            f"{path}: draft_vocab_size is {json.dumps(size)[:40]}, and must be from 1 to vocab_size, "
            f"{layer_values['vocab_size']}."
        )
    ids = values.get(LAYER_IDS)
    if ids is not None and not (isinstance(ids, list) and all(type(layer) is int for layer in ids)):
        raise DRAFT_HEAD.error(f"{path}: {LAYER_IDS} must be a list of {NUM_STATES} layers.")


def _check_target(config: DraftConfig, target: PreTrainedConfig, folder: Path) -> None:
    text = target.get_text_config()
    for name, found in (("hidden_size", config.hidden_size), ("vocab_size", config.vocab_size)):
        wanted = config_value(text, name)
        if found != wanted:
            raise DRAFT_HEAD.error(
                f"{folder} drafts for a model with {name} {found}, and this one has {wanted}.",
                hint="Use it with its own model, or train a head for this one.",
            )


def _as_in_head(tensors: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return tensors, or their shapes, by the names of DraftHead."""
    found = {}
    for name, one in tensors.items():
        for prefix, new in renamed.items():
            if name.startswith(prefix):
                name = new + name.removeprefix(prefix)
        found[name] = one
    return found


def _check_shapes(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise UserError unless a file holds exactly the tensors of the head, before anything is allocated."""
    with torch.device("meta"):
        expected = {name: tuple(one.shape) for name, one in DraftHead(config).state_dict().items()}
    missing = [name for name in expected if name not in shapes]
    if missing and missing[0] in TABLES:
        raise DRAFT_HEAD.error(
            f"{path} lacks {missing[0]}, and the head drafts {config.draft_vocab_size} of {config.vocab_size} tokens: "
            "without the table their ids are not known."
        )
    if missing:
        raise DRAFT_HEAD.error(f"{path} lacks {missing[0]}.", hint="Write the head again.")
    unknown = [name for name in shapes if name not in expected and name != EMBEDDING]
    if unknown:
        raise DRAFT_HEAD.error(f"{path} holds {unknown[0]}, which this head does not have.")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise DRAFT_HEAD.error(f"{path}: {name} is {list(shapes[name])}, and {CONFIG} asks for {list(shape)}.")


def _check_tables(config: DraftConfig, d2t: Tensor, t2d: Tensor, path: Path) -> None:
    """Raise UserError unless t2d marks exactly the ids that d2t leads to."""
    ids = torch.arange(config.draft_vocab_size) + d2t
    is_right = d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    if is_right and bool((ids >= 0).all()) and bool((ids < config.vocab_size).all()):
        marked = torch.zeros(config.vocab_size, dtype=torch.bool)
        marked[ids] = True
        if bool((marked == t2d).all()) and int(marked.sum()) == config.draft_vocab_size:
            return
    raise DRAFT_HEAD.error(f"{path}: d2t and t2d do not describe the same {config.draft_vocab_size} tokens.")


def _trained_ids(path: Path) -> tuple[int, ...] | None:
    """Return the layer ids that the weight file records; None if others wrote it."""
    with loading(DRAFT_HEAD, f"{path} cannot be read"):
        recorded = _metadata(path).get("layer_ids")
        return None if recorded is None else tuple(json.loads(recorded))


def target_of_draft(folder: Path) -> str:
    """Return the folder or hub id of the model that a head was trained for. Raises UserError if it is not recorded."""
    path = folder / SAFE_WEIGHTS
    with loading(DRAFT_HEAD, f"{path} cannot be read"):
        name = _metadata(path).get("target")
    if name is None:
        raise DRAFT_HEAD.error(f"{path} does not say which model it drafts for.")
    return name


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}
