"""Read a model's configuration: the only place that does, for every command.

It imports no model class of transformers: `ligertune data` needs none, and importing them takes a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError, plural
from ligertune.files.hub import check_hub_model
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin, check_sizes, loading, read_json

if TYPE_CHECKING:
    from ligertune.planning.options import ModelOptions

ISOLATED_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe"}  # layer types that keep no state
LINEAR_LAYERS = {"linear_attention", "conv", "mamba"}  # those without attention
RECURRENT_LAYERS = LINEAR_LAYERS | {"hybrid", "hybrid_sliding"}  # `carried_state` looks at the model itself
# Keys of a configuration whose model may have a recurrence or a convolution: Mamba's, linear attention's, LFM2's.
STATE_KEYS = re.compile(r"mamba|ssm|conv|state_size|linear_|recurren|rwkv|delta", re.IGNORECASE)

FULL = "full_attention"
LENGTH = "original_max_position_embeddings"
OF_ALL_ROPE = ("rope_type", "rope_theta")
ROPE_KEYS: dict[str, tuple[str, ...]] = {  # rope_type -> what it reads besides
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", LENGTH, "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", LENGTH, "low_freq_factor", "high_freq_factor"),
}
LENGTHENING = ("linear", "yarn", "llama3")
OF_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHER_SCALING = {"short_factor", "long_factor", "mscale", "mscale_all_dim", "truncate"}  # that a model may have
SCALING = OTHER_SCALING.union(*ROPE_KEYS.values())


def read_config(spec: ModelOptions, origin: ModelOrigin = RECIPE_MODEL) -> PreTrainedConfig:
    """Read the model's configuration, with the recipe's number of layers and rotary embeddings. Raises UserError."""
    name = spec.model_name_or_path
    file, values = _read_values(spec, origin)
    if not spec.trust_remote_code:
        check_sizes(values, file, origin)
        if values.get("auto_map") and str(values.get("model_type")) not in CONFIG_MAPPING:
            raise origin.own_code(file)
    if values.get("output_attentions"):  # such a model could not be saved after training
        raise origin.error(f"{file}: output_attentions is set; kernels give no attention maps.", hint="Write false.")
    with loading(origin, f"{file} cannot be used"):
        config = AutoConfig.from_pretrained(name, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
        text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise origin.error(f"{file}: text_config is no configuration of a {config.model_type} model.")
    reads_text_only = modality_of(config).facts.reads_text_only  # raises UserError for a family that cannot be trained
    if reads_text_only and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not spec.trust_remote_code:
        if "AutoModelForCausalLM" in (values.get("auto_map") or {}):
            raise origin.own_code(file)
        raise origin.error(
            f"{name} is a {config.model_type} model, and transformers has no causal language model of that kind.",
            hint="Give a model that generates text.",
        )
    if spec.num_hidden_layers is not None:
        truncate(config, spec.num_hidden_layers)
    override_rope(config, spec.rope_parameters.model_dump(exclude_none=True))
    return config


def _read_values(spec: ModelOptions, origin: ModelOrigin) -> tuple[str, dict[str, Any]]:
    """Return (config.json as messages name it, its content), of a folder or from the hub."""
    name = spec.model_name_or_path
    folder = Path(name).expanduser()
    _check_name(name, folder, origin)
    if folder.is_dir():
        return str(folder / "config.json"), read_json(folder / "config.json", origin)
    check_hub_model(name, key=origin.key, revision=spec.revision)
    missing = f"{name} is not a folder here, and the hub could not be reached or has no such model"
    with loading(origin, missing, "Check the spelling, the network, and for gated models the login (`hf auth login`)."):
        values, _ = PreTrainedConfig.get_config_dict(name, revision=spec.revision)
    return f"config.json of {name}", values


def _check_name(name: str, path: Path, origin: ModelOrigin) -> None:
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
            raise origin.error(
                f"the folder {name} holds an adapter, and no whole model.",
                hint=f"Merge it, and name the merged model: ligertune export {name} --out FOLDER",
            )
        if not (path / "config.json").is_file():
            raise origin.error(
                f"the folder {name} holds no config.json.",
                hint="Give the folder that save_pretrained wrote, or a hub id.",
            )
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:  # no hub id looks like this
        found = "is a file, not a folder" if path.exists() else "does not exist"
        raise origin.error(
            f"{name} {found}.",
            hint="Give a folder with config.json and model.safetensors, or a hub id such as Qwen/Qwen2.5-0.5B.",
        )


def truncate(config: PreTrainedConfig, depth: int) -> None:
    """Keep the first `depth` layers; lists with one entry per layer are truncated too."""
    text = config.get_text_config()
    full = config_value(text, "num_hidden_layers", 0)
    if not full:
        raise UserError(f"model.num_hidden_layers: a {text.model_type} configuration has no such number.")
    if depth > full:
        raise UserError(
            f"model.num_hidden_layers: {depth}, but the model has {plural(full, 'layer')}.", hint="Write fewer."
        )
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == full:
            setattr(text, name, value[:depth])
    if hasattr(text, "cross_attention_layers"):
        text.cross_attention_layers = [layer for layer in text.cross_attention_layers if layer < depth]
    text.num_hidden_layers = depth


def override_rope(config: PreTrainedConfig, given: Mapping[str, Any]) -> None:
    """Change the rotary embeddings to those of `model.rope_parameters`, in place. Raises UserError.

    Where layers differ, those with full attention are changed: a sliding window has one length. Scaled embeddings make
    the context longer (max_position_embeddings); those of `dynamic` begin to differ at that length, which stays.
    """
    if not given:
        return
    text = config.get_text_config()
    values = getattr(text, "rope_parameters", None) or {}
    is_nested = isinstance(values.get(FULL), dict)
    values = values[FULL] if is_nested else values
    if "rope_type" not in values:
        raise UserError(
            f"model.rope_parameters: a {text.model_type} configuration has no such parameters to change.",
            hint="Leave it out.",
        )
    new = _changed_rope(values, given, text.max_position_embeddings)
    text.rope_parameters = {**text.rope_parameters, FULL: new} if is_nested else new
    if new["rope_type"] in LENGTHENING:
        length = new.get(LENGTH) or values.get(LENGTH) or text.max_position_embeddings
        text.max_position_embeddings = max(text.max_position_embeddings, int(length * new["factor"]))


def _changed_rope(values: Mapping[str, Any], given: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return a model's rope_parameters with those of a recipe. context: max_position_embeddings of the model."""
    kind = given.get("rope_type", values["rope_type"])
    read = (*OF_ALL_ROPE, *ROPE_KEYS.get(kind, ()))
    for name in given:
        if name not in read:
            raise UserError(f"model.rope_parameters.{name} has no effect on rope_type: {kind}.", hint="Leave it out.")
    kept = {name: value for name, value in values.items() if kind == values["rope_type"] or name not in SCALING}
    new = {**kept, **given, "rope_type": kind}
    if "factor" in read and "factor" not in new:
        raise UserError(
            f"model.rope_parameters: rope_type: {kind} needs a factor.", hint="Give model.rope_parameters.factor."
        )
    for name, default in {LENGTH: values.get(LENGTH) or context, **OF_LLAMA_3}.items():
        if name in read:
            new.setdefault(name, default)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in given and high in given and given[low] >= given[high]:
            raise UserError(
                f"model.rope_parameters: {low} is {given[low]:g}, and {high} is {given[high]:g}.",
                hint=f"{high} must be the larger one.",
            )
    return new


def config_value(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    """Return a value of a configuration, the largest if layers differ; `default` if it has none or null.

    No name is in every configuration: Mamba has no attention heads, Blt no number of layers.
    """
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers 5.24 gives no single value where layers differ, as in Gemma 4
        value = [getattr(layer, name, None) for layer in config.per_layer_config]
    if isinstance(value, list | tuple):
        value = max((one for one in value if one is not None), default=None)
    return default if value is None else value


def unknown_layers(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of layers of which nothing is known: they may carry state from document to document."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return sorted(set(kinds) - ISOLATED_LAYERS - RECURRENT_LAYERS)


def may_carry_state(config: PreTrainedConfig) -> bool:
    """Return whether a model may have layers that carry state from token to token, by its configuration alone."""
    return bool(unknown_layers(config)) or any(STATE_KEYS.search(key) for key in config.get_text_config().to_dict())
