"""Saved models: write weights, tokenizer and prompt format so that Hugging Face's tools load them; and load them again.

A recipe saved in the folder cannot allow the model's own code, since a folder may come from anyone: only the command
line can.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligertune.any_types import AnyModule
from ligertune.errors import UserError
from ligertune.files.base_model import CarriedTensors, TrainedBase
from ligertune.files.hub import TOKENIZER_FILES
from ligertune.files.model_files import (
    ADAPTER_CONFIG,
    ModelOrigin,
    check_contents,
    fingerprint_of_files,
    loading,
    read_json,
    stored_shapes,
)
from ligertune.files.storage import PROMPT_FILE, new_folder, write_text
from ligertune.models.adapters.adapter_files import check_adapter, fitted_config
from ligertune.models.block_scaled.block_format import block_format
from ligertune.models.carried_tensors import add_carried
from ligertune.models.load import auto_class, build_model, carried_by, quiet_reports, stored_dtype, whole_model
from ligertune.models.load_tokenizer import read_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.score_head import HEADS, SEQ_CLS, embedding_rows, gives_scores, make_scored
from ligertune.models.shape import base_of
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.options import DataOptions, ModelOptions, TokenizerOptions
from ligertune.planning.saved_model import saved_options, trained_base
from ligertune.recipe.section import RESERVED_VARIABLES, path_fault

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.data.modalities.modality import ModalityReader
    from ligertune.models.adapters.four_bit_residual import InitialLora

SAVED_MODEL = ModelOrigin("MODEL", "add --trust-remote-code")  # of an argument of generate, chat or export


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    state_dict: dict[str, torch.Tensor] | None,
    prompt: Mapping[str, Any],
    reader: ModalityReader | None = None,
    base: TrainedBase | None = None,
    carried: tuple[ModelOptions, CarriedTensors] | None = None,
) -> None:
    """Write weights (safetensors), configuration, tokenizer and image processor; `folder` appears only when complete.

    state_dict: the gathered weights if the model's own are sharded. prompt: as `prompt_of` or `read_prompt` return it.
    base: the model that was trained. carried: a base and its tensors that the model class does not load. Raises
    UserError, with the model written, if they are gone.
    """
    # Without this option peft asks the hub whether the embedding was resized.
    options: dict[str, Any] = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    if gives_scores(model.config) and tokenizer.pad_token_id is not None:  # the score is read before padding
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if state_dict and not options:  # PEFT looks for both names of a tied embedding that trains
        state_dict = without_tied(model, state_dict)
    with new_folder(folder) as aside:
        with _plain_adapter(model, state_dict) as weights:
            model.save_pretrained(aside, state_dict=weights, **options)
        (aside / "README.md").unlink(missing_ok=True)  # peft's, with placeholders only; `export` writes a model card
        tokenizer.save_pretrained(aside)
        if reader is not None:
            reader.save(aside)
        write_prompt(aside, prompt, base)
        problem = None if carried is None or options else add_carried(aside, *carried)
    if problem is not None:
        raise problem


@contextlib.contextmanager
def _plain_adapter(
    model: AnyModule, state_dict: dict[str, torch.Tensor] | None
) -> Iterator[dict[str, torch.Tensor] | None]:
    """Yield the weights to write: those of plain LoRA for an adapter whose start has changed the model's weights."""
    if not getattr(model, "initial_lora", None):
        yield state_dict
        return
    from ligertune.models.adapters.initial_lora import as_plain_lora

    weights, config = as_plain_lora(model, state_dict)
    model.peft_config["default"], trained_config = config, model.peft_config["default"]
    try:
        yield weights
    finally:
        model.peft_config["default"] = trained_config


def without_tied(model: PreTrainedModel, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep tied weights under their first name only: gathered, they are copies that safetensors would write twice."""
    first: dict[int, str] = {}
    tied = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }
    return {name: tensor for name, tensor in state_dict.items() if name not in tied}


def prompt_of(template: str, data: DataOptions) -> dict[str, Any]:
    """Return the prompt of `write_prompt` for the template that the training data had."""
    name = {"alpaca": "alpaca", "plain": "raw"}.get(template, "chat")
    return _prompt(name, data.system_prompt, data.chat_template_kwargs)


def _prompt(
    prompt_template: str, system_prompt: str | None, chat_template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    prompt = {"prompt_template": prompt_template, "system_prompt": system_prompt}
    return prompt | ({"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {})


def write_prompt(folder: Path, prompt: Mapping[str, Any], base: TrainedBase | None = None) -> None:
    """Write the prompt template and system prompt of training, and variables of the template if there are any.

    prompt: as `prompt_of` returns it. base: the model that was trained, which an adapter needs as it was.
    """
    written = dict(prompt)
    if base is not None:
        written["base"] = base.as_dict()
    write_text(folder / PROMPT_FILE, json.dumps(written, indent=1) + "\n")


def read_prompt(folder: Path) -> dict[str, Any]:
    """Return {prompt_template, system_prompt} of a saved model, and chat_template_kwargs if training had them.

    Other models get their chat template. Raises UserError for a damaged file.
    """
    path = folder / PROMPT_FILE
    if not path.is_file():
        return {"prompt_template": "chat", "system_prompt": None}
    found = read_json(path, SAVED_MODEL)
    if found.get("prompt_template") not in ("chat", "alpaca", "raw"):
        raise SAVED_MODEL.error(f"{path}: prompt_template must be chat, alpaca or raw.")
    if not isinstance(found.get("system_prompt"), str | None):
        raise SAVED_MODEL.error(f"{path}: system_prompt must be a text or null.")
    variables = found.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or set(variables) & set(RESERVED_VARIABLES):
        raise SAVED_MODEL.error(f"{path}: chat_template_kwargs must be an object of variables of the chat template.")
    return _prompt(found["prompt_template"], found.get("system_prompt"), variables)


def adapter_base_model(folder: Path) -> str:
    """Return the folder or hub id of the model that a saved adapter belongs to. Raises UserError if it is not named."""
    base = read_json(folder / ADAPTER_CONFIG, SAVED_MODEL).get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise UserError(f"{folder} does not name the model that its adapter belongs to (base_model_name_or_path).")
    fault = path_fault(base)
    if fault is not None:
        raise UserError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path {fault}")
    return base


def adapter_revision(folder: Path) -> str | None:
    """Return the commit or branch of the base model that a saved adapter belongs to; None if it names none."""
    found = read_json(folder / ADAPTER_CONFIG, SAVED_MODEL).get("revision")
    if not isinstance(found, str | None):
        raise SAVED_MODEL.error(f"{folder / ADAPTER_CONFIG}: revision must be a text or null.")
    return found or None


# ---- loading, for `generate`, `chat` and `export`


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter without its base model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def saved_spec(name: str, *, trust_remote_code: bool, tokenizer: str | None = None) -> ModelOptions:
    """Return how to load a folder or hub id: the base model of an adapter, and the tokenizer saved with it.

    tokenizer: the folder of another tokenizer.
    """
    folder = Path(name).expanduser()
    base = name
    revision = None
    if is_adapter(folder):
        base = adapter_base_model(folder)
        revision = adapter_revision(folder)
        has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
        tokenizer = tokenizer or (name if has_tokenizer else None)
    return ModelOptions(
        model_name_or_path=base,
        revision=revision or "main",
        tokenizer=TokenizerOptions(path=tokenizer),
        trust_remote_code=trust_remote_code,
    )


def read_saved_config(name: str, spec: ModelOptions) -> PreTrainedConfig:
    """Return the configuration of a folder or hub id; of an adapter, that of the model which it adapts."""
    config = read_config(spec, SAVED_MODEL)
    folder = Path(name).expanduser()
    if is_adapter(folder):
        _make_scored_as_saved(config, folder)
    return config


def load_saved(
    name: str,
    *,
    trust_remote_code: bool,
    tokenizer: str | None = None,
    base: TrainedBase | None = None,
    attention: str = "auto",
    keep_wrapper: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, onto the GPU if there is one, and its tokenizer. Raises UserError.

    tokenizer: the folder of another tokenizer than the model's. base: the model as heads were trained on it; an adapter
    names its own. attention: name of the implementation. keep_wrapper: return PEFT's wrapper of an adapted model.
    """
    spec = saved_spec(name, trust_remote_code=trust_remote_code, tokenizer=tokenizer)
    spec = spec.model_copy(update={"attn_implementation": attention})
    folder = Path(name).expanduser()
    base = trained_base(folder) if is_adapter(folder) else base
    spec = _as_trained(spec, base)
    config = read_saved_config(name, spec)
    loaded = read_tokenizer(spec, SAVED_MODEL)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if is_adapter(folder) and block_format(config) is not None:  # it was trained on the base as it is stored
        dtype = stored_dtype(config) if base is None else getattr(torch, base.dtype)
        model = build_model(
            spec, config, dtype=dtype, device=device, seed=0, stored_as="as in the files", origin=SAVED_MODEL
        )
    elif base is None:
        model = build_model(spec, config, dtype=stored_dtype(config), device=device, seed=0, origin=SAVED_MODEL)
    else:
        model = base_as_trained(spec, config, base, initial=initial_of(folder, base))
        model = model.to(device)  # type: ignore[arg-type]  # as in `load.py`
    if is_adapter(folder):
        adapted: AnyModule = load_trained_adapter(model, folder, base)
        model = adapted if keep_wrapper else base_of(adapted)  # with the adapter in its layers
    return model.eval(), loaded


def _make_scored_as_saved(config: PreTrainedConfig, adapter: Path) -> None:
    """Turn the configuration of a saved adapter's base model into what the adapter was trained on, in place.

    Names of labels are in the recipe of the run; without it, only their number is known, from the adapter's score head.
    """
    options = saved_options(adapter)
    if options is not None:
        feature_of(options.build.task).prepare_config(config, options.build, SAVED_MODEL)
        return
    if read_json(adapter / ADAPTER_CONFIG, SAVED_MODEL).get("task_type") != SEQ_CLS:
        return
    shapes = stored_shapes(adapter, SAVED_MODEL, explicit="adapter_model.safetensors")
    heads = [shape for name, shape in shapes.items() if name.removesuffix(".weight").endswith(HEADS)]
    if not heads:
        raise SAVED_MODEL.error(f"the adapter in {adapter} was trained to score texts, and holds no score head.")
    make_scored(config, num_labels=heads[0][0], origin=SAVED_MODEL)


def _as_trained(spec: ModelOptions, base: TrainedBase | None) -> ModelOptions:
    """Return how to load the base model in the revision, and with the rotary embeddings, of its training."""
    if base is None:
        return spec
    rope = spec.rope_parameters.model_copy(update=base.rope_parameters or {})
    return spec.model_copy(update={"revision": base.revision or spec.revision, "rope_parameters": rope})


def base_as_trained(
    spec: ModelOptions,
    config: PreTrainedConfig,
    base: TrainedBase | None,
    *,
    initial: Mapping[str, InitialLora] | None = None,
) -> PreTrainedModel:
    """Load the base model of an adapter or a checkpoint with the weights that it was trained on. Raises UserError.

    base: as the run has recorded it; None: the model's own dtype. initial: adapters that were subtracted before the
    weights were quantised, by the path of the layer.
    """
    if base is None:
        return whole_model(spec, config, origin=SAVED_MODEL)
    residuals = None if initial is None else partial(_store_residuals, initial)
    return whole_model(
        spec, config, trained_in=base.dtype, stored_as=base.stored_as, residuals=residuals, origin=SAVED_MODEL
    )


def _store_residuals(initial: Mapping[str, InitialLora], model: PreTrainedModel, original: PreTrainedModel) -> None:
    from ligertune.models.adapters.four_bit_residual import store_residuals  # imports peft, which takes seconds

    with loading(SAVED_MODEL, "the initial adapter does not fit the base model"):
        store_residuals(model, original, initial)


def initial_of(folder: Path, base: TrainedBase | None) -> dict[str, InitialLora] | None:
    """Return the initial adapters that a saved adapter holds; None if its base was not changed by any."""
    if base is None or base.residual_of is None or not is_adapter(folder):
        return None
    from ligertune.models.adapters.four_bit_residual import initial_of_adapter  # imports peft, which takes seconds

    check_adapter(folder, SAVED_MODEL)
    with loading(SAVED_MODEL, f"{folder} holds no adapter of this model"):
        return initial_of_adapter(folder, SAVED_MODEL)


def load_trained_adapter(model: PreTrainedModel, folder: Path, base: TrainedBase | None) -> PeftModel:
    """Load a saved adapter onto its base as it was trained, without the initial adapter that the base lacks."""
    from ligertune.models.adapters.lora import load_adapter  # imports peft, which takes seconds

    adapted = load_adapter(model, str(folder), SAVED_MODEL)
    if base is not None and base.residual_of is not None:
        from ligertune.models.adapters.four_bit_residual import leave_initial_out

        leave_initial_out(adapted)
    return adapted


def check_same_base(spec: ModelOptions, base: TrainedBase | None) -> None:
    """Raise UserError if the files of a base model are no longer those that were trained."""
    folder = Path(spec.model_name_or_path).expanduser()
    if base is None or base.fingerprint is None or not folder.is_dir():
        return
    explicit = read_json(folder / "config.json", SAVED_MODEL).get("transformers_weights")
    if fingerprint_of_files(folder, SAVED_MODEL, explicit=explicit) != base.fingerprint:
        raise UserError(
            f"The base model in {folder} has changed since the training: its config.json or weight files are others.",
            hint="Put back the files that were trained, or train again.",
            exit_code=1,
        )


def load_plain(folder: Path, *, trust_remote_code: bool, base: PreTrainedModel | None = None) -> nn.Module:
    """Load a saved model or adapter as a user without ligertune does, with transformers and PEFT alone.

    base: the adapter's base model; None: the one that it names, in the dtype of training. Raises UserError for files
    that are damaged.
    """
    if not is_adapter(folder):
        return _load_plain_model(saved_spec(str(folder), trust_remote_code=trust_remote_code))
    check_adapter(folder, SAVED_MODEL)
    if base is None:
        spec = _as_trained(saved_spec(str(folder), trust_remote_code=trust_remote_code), trained_base(folder))
        base = _load_plain_model(spec, folder)
    import peft  # takes seconds

    config = fitted_config(base, folder, SAVED_MODEL)
    with loading(SAVED_MODEL, f"{folder} holds no adapter of this model"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes of transformers by their old names
        return peft.PeftModel.from_pretrained(base, folder, config=config)


def _load_plain_model(spec: ModelOptions, adapter: Path | None = None) -> PreTrainedModel:
    name = spec.model_name_or_path
    options = {"trust_remote_code": spec.trust_remote_code, "revision": spec.revision}
    if torch.cuda.is_available():
        options["device_map"] = {"": "cuda"}
    config = read_config(spec, SAVED_MODEL)
    if adapter is not None:
        _make_scored_as_saved(config, adapter)
        base = trained_base(adapter)
        options |= {} if base is None else {"dtype": getattr(torch, base.dtype)}
    with loading(SAVED_MODEL, f"the weights of {name} could not be loaded"), quiet_reports():  # of the adapter's head
        return auto_class(config).from_pretrained(name, config=config, **options)


def read_saved_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a saved model or adapter. Raises UserError."""
    return read_tokenizer(saved_spec(str(folder), trust_remote_code=trust_remote_code), SAVED_MODEL)


def in_dtype(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Convert a model's weights to a dtype. Raises UserError for numbers that are too large for it."""
    model = model.to(getattr(torch, name))
    for key, parameter in model.named_parameters():
        if name == "float16" and not bool(parameter.isfinite().all()):
            raise UserError(
                f"--dtype: {key} has numbers above 65,504, the largest of float16.", hint="Write --dtype bfloat16."
            )
    return model


def read_whole_model(
    folder: Path, dtype: str, *, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[ModelOptions, CarriedTensors] | None]:
    """Load a saved model with dense weights in a dtype, and its tokenizer; the rest as of `merge_saved_adapter`."""
    spec = saved_spec(str(folder), trust_remote_code=trust_remote_code)
    config = read_saved_config(str(folder), spec)
    tokenizer = read_tokenizer(spec, SAVED_MODEL)
    original = copy.deepcopy(config)
    model = in_dtype(whole_model(spec, config, trained_in=dtype, origin=SAVED_MODEL), dtype)
    carried = carried_by(spec, original, origin=SAVED_MODEL)
    return model, tokenizer, None if carried is None else (spec, carried)


def merge_saved_adapter(
    folder: Path, base: TrainedBase | None, *, trust_remote_code: bool, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[ModelOptions, CarriedTensors] | None]:
    """Load the adapter in `folder` merged into its base model as it was trained, and its tokenizer. Raises UserError.

    dtype: of the merged weights; None: that of training.

    Also return what `write_model` needs to write the base's tensors that its class does not load.
    """
    from ligertune.models.adapters.lora import merged_model  # imports peft, which takes seconds

    spec = saved_spec(str(folder), trust_remote_code=trust_remote_code)
    spec = _as_trained(spec, base)
    config = read_saved_config(str(folder), spec)
    tokenizer = read_tokenizer(spec, SAVED_MODEL)
    original = copy.deepcopy(config)
    check_same_base(spec, base)
    model = base_as_trained(spec, config, base, initial=initial_of(folder, base))
    if dtype == "float32":  # the sum is not rounded
        model = model.float()
    adapted = load_trained_adapter(model, folder, base)
    with loading(SAVED_MODEL, f"the adapter in {folder} cannot be merged"):  # some kinds of LoRA change with the prompt
        merged = merged_model(adapted)
    merged = merged if dtype is None else in_dtype(merged, dtype)
    carried = carried_by(spec, original, rows=embedding_rows(merged), origin=SAVED_MODEL)
    return merged, tokenizer, None if carried is None else (spec, carried)


def check_saved(folder: Path, *, trust_remote_code: bool) -> None:
    """Check a folder that is copied or uploaded as it is, without loading its weights. Raises UserError."""
    check_contents(folder, SAVED_MODEL)
    if is_adapter(folder):
        check_adapter(folder, SAVED_MODEL)
        return
    spec = saved_spec(str(folder), trust_remote_code=trust_remote_code)
    config = read_config(spec, SAVED_MODEL)
    read_tokenizer(spec, SAVED_MODEL)
    stored_shapes(folder, SAVED_MODEL, explicit=getattr(config, "transformers_weights", None))
