"""Load a model's weights: the only place that does, for every command. `read_config.py` reads its configuration.

The model's own Python code is never run unless the recipe or the command line allows it; there is no prompt. Errors
begin with the recipe key or argument that named the model.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError, plural
from ligertune.files.base_model import STORED_AS, HeldAs, StoredAs, four_bit_format
from ligertune.files.model_files import (
    RECIPE_MODEL,
    RECIPE_TOKENIZER,
    ModelOrigin,
    check_amount,
    check_token_ids,
    loading,
    read_json,
    reason_of,
    shape_error,
    stored_shapes,
)
from ligertune.models.added_tokens import grow, needed_rows
from ligertune.models.block_scaled.block_format import BlockFormat, block_format, hold_on_meta, stored_weights
from ligertune.models.block_scaled.load_stored import StoredWeightsConfig, few_wide_weights, finish_held
from ligertune.models.carried_tensors import find_carried, is_separate
from ligertune.models.load_tokenizer import read_tokenizer
from ligertune.models.mixers.decays import decays_read_as_float32, make_decays_float32
from ligertune.models.quantised_bases.base_formats import BaseFormat, is_packed
from ligertune.models.quantised_bases.fit_recipe import check_base
from ligertune.models.quantised_bases.load_packed import PackedConfig
from ligertune.models.quantised_bases.stored_weights import compute_in, dequantised_model, stored_quantization
from ligertune.models.score_head import SCORE_AUTO_CLASS, gives_scores, is_outside_backbone
from ligertune.planning.memory.layer_bytes import FA4_OR_DOCUMENT_ATTENTION

if TYPE_CHECKING:
    from ligertune.files.base_model import CarriedTensors
    from ligertune.planning.options import ModelOptions


DEQUANTISED = ("fp8", "mxfp4")  # formats of files that are dequantised unless an adapter trains on them


def hide_loading_bars() -> None:
    """Disable transformers' progress bars for loading and saving; the run shows its own progress."""
    disable_progress_bar()


# ---- model


def auto_class(config: PreTrainedConfig) -> type[Any]:
    """Return transformers' auto class for a configuration."""
    if gives_scores(config):
        return SCORE_AUTO_CLASS
    return getattr(transformers, modality_of(config).auto_class)


def build_model(
    spec: ModelOptions,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    stored_as: HeldAs | None = None,
    storage: str = "uint8",
    origin: ModelOrigin = RECIPE_MODEL,
) -> PreTrainedModel:
    """Return the model on `device`: pretrained, or random from `seed`; without weights on the meta device.

    stored_as: format to which the layers' weights are quantised while they are loaded; "as in the files": a
    block-scaled base stays as it is stored. Embedding and output head have rows for the tokens that the recipe adds.
    storage: dtype that holds the bytes of 4-bit weights. Raises UserError.
    """
    loaded = copy.deepcopy(config) if spec.tokenizer.adds else config  # growing changes it
    place = torch.device(device)
    model = _build(
        spec, loaded, dtype=dtype, device=place, seed=seed, stored_as=stored_as, storage=storage, origin=origin
    )
    if spec.tokenizer.adds:
        rows = needed_rows(read_tokenizer(spec, RECIPE_TOKENIZER), spec.tokenizer, config)
        grow(model, rows, seed=seed, mean_resizing=spec.tokenizer.mean_resizing)
    return model


def _build(
    spec: ModelOptions,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    stored_as: HeldAs | None,
    storage: str,
    origin: ModelOrigin,
) -> PreTrainedModel:
    four_bits = four_bit_format(stored_as)
    is_random = spec.init == "random"
    held = None if is_random or stored_as in STORED_AS else block_format(config)
    found = None if is_random else _stored_format(spec.model_name_or_path, config, stored_as, origin)
    if device.type == "meta" or (is_random and four_bits is None):
        # Same seed and device: same weights. The global random state is restored.
        with _seeded(seed, device), device:
            model = _new_model(spec, config, dtype=dtype, origin=origin)
        if not is_random:  # a plan refuses it, too
            _refuse_quantised_experts(spec.model_name_or_path, config, model, origin, four_bits)
        if held is not None and stored_as is not None:
            hold_on_meta(model, held)
        return model
    with torch.device("meta"):  # building changes a configuration
        skeleton = _new_model(spec, copy.deepcopy(config), dtype=dtype, origin=origin)
    quantization = stored_quantization(found, config, dtype) or _quantization(
        skeleton, held, stored_as, dtype=dtype, storage=storage
    )
    if isinstance(quantization, StoredWeightsConfig):
        config = copy.deepcopy(config)
        del config.quantization_config  # transformers' quantizer of it is for inference
    options = _loading_options(spec, config, device, quantization)
    if is_random:
        return _random_in_four_bits(skeleton, config, seed=seed, dtype=dtype, **options)
    _refuse_quantised_experts(spec.model_name_or_path, config, skeleton, origin, four_bits)
    with _seeded(seed, device):  # a score head that the checkpoint does not have
        model = _pretrained_model(spec, config, skeleton, origin, dtype=dtype, **options)
    compute_in(model, dtype)
    if isinstance(quantization, StoredWeightsConfig):
        finish_held(model, dequantise=stored_as is None)
    if "device_map" in options:
        return _never_packed(model)
    return model.to(device)  # type: ignore[arg-type]  # transformers wraps `to`, and the wrapper has other types


def _quantization(
    skeleton: PreTrainedModel, held: BlockFormat | None, stored_as: HeldAs | None, *, dtype: torch.dtype, storage: str
) -> Any:
    """Return the quantisation for from_pretrained. held: format of the files, if that is ours to read."""
    if held is not None and stored_weights(skeleton, held):
        return StoredWeightsConfig(held)
    if stored_as == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    four_bits = four_bit_format(stored_as)
    if four_bits is None:
        return None
    from ligertune.models.experts.four_bit_experts import four_bit_config

    quant_type, double_quant = four_bits
    return four_bit_config(skeleton, dtype, quant_type=quant_type, double_quant=double_quant, storage=storage)


def _random_in_four_bits(skeleton: PreTrainedModel, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    # transformers' quantizers import bitsandbytes, which takes seconds
    from ligertune.models.experts.four_bit_experts import random_in_four_bits

    with quiet_reports():  # of buffers that no weight initialises
        return _never_packed(random_in_four_bits(skeleton, config, **options))


def _refuse_quantised_experts(
    name: str, config: PreTrainedConfig, model: PreTrainedModel, origin: ModelOrigin, four_bits: object
) -> None:
    """Raise UserError for experts whose files are quantised, if four_bits is a format that they would be stored in."""
    if four_bits is None:
        return
    from ligertune.models.experts.four_bit_experts import refuse_quantised  # as above

    refuse_quantised(name, config, model, origin)


def _never_packed(model: PreTrainedModel) -> PreTrainedModel:
    """Keep bitsandbytes from packing 4-bit weights for a CPU in the first evaluation: they would have no gradients."""
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers meanwhile, and restore their states on the host and the device."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _loading_options(
    spec: ModelOptions, config: PreTrainedConfig, device: torch.device, quantization: Any
) -> dict[str, Any]:
    """Return the keywords of `from_pretrained` that decide on attention, quantisation and place."""
    options = _attention(spec.attn_implementation, config)
    stays = spec.init != "random" and getattr(config, "quantization_config", None) is not None  # as in the files
    if quantization is not None and not stays:
        options["quantization_config"] = quantization
    if device.type == "cuda" or quantization is not None:
        options["device_map"] = {"": device}  # tensors go to the device one by one: no copy in host memory
    return options


def _stored_format(
    name: str, config: PreTrainedConfig, stored_as: HeldAs | None, origin: ModelOrigin
) -> BaseFormat | None:
    """Return the format of a quantised checkpoint. Raises UserError for weights that would be quantised twice."""
    found = check_base(name, config, origin)
    if stored_as in STORED_AS and found is not None and found.training != "bitsandbytes":
        raise origin.error(
            f"the weights of {name} are quantised already ({quantization_of(config)}), and method quantises weights in"
            " 16 or 32 bits.",
            hint="Write method.type: lora without load_in_8bit, which trains on them as they are stored, or give the"
            " checkpoint in bfloat16.",
        )
    return found


def _new_model(
    spec: ModelOptions, config: PreTrainedConfig, *, dtype: torch.dtype, origin: ModelOrigin
) -> PreTrainedModel:
    """Build the model on the current default device. Raises UserError that blames attention or configuration."""
    build = auto_class(config).from_config
    options = {"dtype": dtype, "trust_remote_code": spec.trust_remote_code}
    before = copy.deepcopy(config)
    try:
        model = build(config, **options, **_attention(spec.attn_implementation, config))
        make_decays_float32(model)
        return model
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        file = f"config.json of {spec.model_name_or_path}"
        key = _key_of(error.args[0], before.to_dict()) if isinstance(error, KeyError) else None
        if key is not None:  # activations and RoPE types are looked up in tables
            raise origin.error(f"{file}: {key} is {error.args[0]}, which transformers does not know.") from error
        with loading(origin, f"{file} cannot be used"), torch.device("meta"):
            build(before, **options)
        raise UserError(  # it works with transformers' own choice: not installed, or unknown to this model
            f"model.attn_implementation: {spec.attn_implementation} cannot be used: {reason_of(error)}",
            hint="Write another one, or auto; if the run packs and none works, write data.packing: false.",
        ) from error


def _key_of(word: object, values: dict[str, Any], prefix: str = "") -> str | None:
    """Return the key with the text value `word`, such as rope_parameters.rope_type; None if there is none."""
    for key, value in values.items():
        found = _key_of(word, value, f"{prefix}{key}.") if isinstance(value, dict) else None
        if found or (isinstance(word, str) and value == word):
            return found or f"{prefix}{key}"
    return None


def _attention(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keyword for from_pretrained. Attention within packed documents is for the language model only."""
    if name == "auto":
        return {}
    ours = "document_attention", FA4_OR_DOCUMENT_ATTENTION, "varlen", "per_document"
    text_only = name in (*ours, "flex_attention")
    return {"attn_implementation": modality_of(config).attn_implementation(name) if text_only else name}


def whole_model(
    spec: ModelOptions,
    config: PreTrainedConfig,
    *,
    trained_in: str | None = None,
    stored_as: StoredAs | None = None,
    residuals: Callable[[PreTrainedModel, PreTrainedModel], None] | None = None,
    origin: ModelOrigin = RECIPE_MODEL,
) -> PreTrainedModel:
    """Load the model unsharded, with the weights that a run has trained on, for export.

    trained_in: dtype of the training; None: the recipe's, or the checkpoint's. stored_as: quantise to this format and
    dequantise, which gives the weights that QLoRA or `method.load_in_8bit` trained on. residuals: called with the
    quantised model and the model before quantisation, to store other weights.
    """
    named = trained_in or (spec.dtype if spec.dtype in ("bfloat16", "float32") else None)
    dtype = getattr(torch, named) if named else stored_dtype(config)
    quantised = stored_as is not None or (spec.init != "random" and is_packed(config))
    device = torch.device("cuda" if torch.cuda.is_available() and quantised else "cpu")
    original = copy.deepcopy(config)  # building a model changes it
    model = build_model(spec, config, dtype=dtype, device=device, seed=0, stored_as=stored_as, origin=origin)
    if residuals is not None:
        residuals(model, build_model(spec, original, dtype=dtype, device="cpu", seed=0, origin=origin))
    return dequantised_model(model)


def carried_by(
    spec: ModelOptions, config: PreTrainedConfig, *, rows: int | None = None, origin: ModelOrigin = RECIPE_MODEL
) -> CarriedTensors | None:
    """Return the tensors of a base that its class does not load; None if its files are not on this machine.

    rows: as of `find_carried`.
    """
    skeleton = build_model(spec, copy.deepcopy(config), dtype=torch.bfloat16, device="meta", seed=0, origin=origin)
    return find_carried(spec, config, skeleton, rows=rows)


def stored_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of a checkpoint's weights as its configuration names it; float32 if it names none."""
    found = config.dtype or torch.float32
    return getattr(torch, found) if isinstance(found, str) else found


# ---- weights


def _pretrained_model(
    spec: ModelOptions,
    config: PreTrainedConfig,
    skeleton: PreTrainedModel,
    origin: ModelOrigin,
    *,
    dtype: torch.dtype,
    **options: Any,
) -> PreTrainedModel:
    """Load the weights. skeleton: the model on the meta device. Raises UserError unless all weights are there."""
    name = spec.model_name_or_path
    folder = Path(spec.model_name_or_path).expanduser()
    _dequantise_files(config)
    shapes: dict[str, tuple[int, ...]] = {}
    if folder.is_dir():
        generation = folder / "generation_config.json"
        if generation.is_file():
            with loading(origin, f"{generation} cannot be used"):
                settings = read_json(generation, origin)
                GenerationConfig.from_dict(settings)
            check_token_ids(settings, generation, origin)
        shapes = stored_shapes(folder, origin, explicit=getattr(config, "transformers_weights", None))
        # of these, several weights are in one element
        is_held = isinstance(options.get("quantization_config"), (PackedConfig, StoredWeightsConfig))
        if getattr(config, "quantization_config", None) is None and not is_held:
            check_amount(name, skeleton, shapes, origin)
    hint = "A folder needs model.safetensors; for random weights write model.init: random."
    try:
        with (
            loading(origin, f"the weights of {name} could not be loaded", hint),
            quiet_reports(),
            decays_read_as_float32(skeleton),
            few_wide_weights(options.get("quantization_config")),
        ):
            model, found = auto_class(config).from_pretrained(
                name,
                config=config,
                dtype=dtype,
                revision=spec.revision,
                trust_remote_code=spec.trust_remote_code,
                output_loading_info=True,
                **options,
            )
    except UserError as problem:
        if folder.is_dir() and not shapes:  # pickle's messages advise to run what such a file says
            raise origin.error(
                f"the .bin weights of {name} are damaged, do not fit its config.json, or hold other Python objects"
                " than tensors, which are never loaded.",
                hint="Convert them to model.safetensors.",
            ) from problem.__cause__
        raise shape_error(name, skeleton, shapes, origin) or problem from problem.__cause__
    _check_names(name, found, skeleton, config, origin)
    _check_numbers(name, model, origin)
    return model


def _check_names(
    name: str, found: dict[str, Any], skeleton: PreTrainedModel, config: PreTrainedConfig, origin: ModelOrigin
) -> None:
    """Raise UserError if weights are missing, or if others would be dropped. found: transformers' loading info."""
    new_head = gives_scores(config)  # of a causal language model: it starts random, and the output head is left out
    missing = sorted(key for key in found["missing_keys"] if not (new_head and is_outside_backbone(key, skeleton)))
    if missing:
        raise origin.error(
            f"{name} lacks {len(missing)} of the model's weights ({_shown(missing)}).",
            hint="Missing weights would start random. Is this the checkpoint of a complete causal language model?",
        )
    unexpected = (key for key in found["unexpected_keys"] if not is_separate(key, skeleton, config))
    extra = sorted(key for key in unexpected if not (new_head and is_outside_backbone(key, skeleton)))
    if extra:
        raise origin.error(
            f"{name} holds {plural(len(extra), 'weight')} that the model of its config.json does not have"
            f" ({_shown(extra)}).",
            hint="They would be dropped. Is its config.json that of another model?",
        )


def quantization_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the quantisation of a checkpoint's files, such as fp8; None if they are not quantised."""
    found = getattr(config, "quantization_config", None) or {}
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method)) if found else None


def _dequantise_files(config: PreTrainedConfig) -> None:
    """Let float8 and MXFP4 files be read as weights in the dtype of training, in place.

    transformers does that on a CPU. On a GPU it keeps them, for inference: an update of such a weight is lost in its
    rounding, and an adapter cannot be merged into it.
    """
    found: Any = getattr(config, "quantization_config", None)
    if quantization_of(config) in DEQUANTISED:
        if isinstance(found, dict):
            found["dequantize"] = True
        else:
            found.dequantize = True


@contextlib.contextmanager
def quiet_reports() -> Iterator[None]:
    """Silence transformers' table of missing and unexpected weights: the error says it in one sentence."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # a higher level of the logger would switch other checks on
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def _check_numbers(name: str, model: PreTrainedModel, origin: ModelOrigin) -> None:
    """Raise UserError for weights that are not numbers. A sum needs no memory, and is not finite then."""
    for key, parameter in model.named_parameters():
        # torch has no sum of float8 on a CPU (2.13)
        if not parameter.is_floating_point() or parameter.itemsize == 1 or parameter.is_meta:
            continue
        if hasattr(parameter, "quant_state"):  # bytes of 4-bit weights in another dtype, which are no numbers
            continue
        values = parameter.magnitudes() if isinstance(parameter, QuantisedWeight) else parameter.detach()
        total = values.sum()
        if bool(total.isnan()) or (bool(total.isinf()) and bool(values.isinf().any())):
            raise origin.error(f"the weights of {name} hold NaN or infinity ({key}).", hint="The files are damaged.")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
