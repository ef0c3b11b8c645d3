"""`ligertune export`: from what a run left to a folder that other tools load.

    an adapter       merged into the weights it stands beside (or, if asked, alone)
    a checkpoint     the model as it was after that step, in Hugging Face's format

Merging adds s B A to W in float32 and rounds once to W's dtype. What was trained on weights in four bits is merged into
those, taken back to W's dtype, and not into the ones they were made from: that is the model that was trained.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.errors import UserError
from ligertune.models.save import ADAPTER_CONFIG, adapter_base_model
from ligertune.planning.options import ModelOptions, RunOptions, saved_options
from ligertune.storage import newest_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "model.safetensors"  # of a checkpoint whose weights all train


@dataclass(frozen=True)
class Exported:
    """What was written, and from what."""

    folder: str
    kind: str  # "merged model", "adapter", "model"
    source: str


def export_run(run: Path, out: Path, *, adapter: bool, checkpoint: str | None) -> Exported:
    """Write `out` from a run's folder, or from a folder that holds an adapter. `checkpoint`: a name like step-200."""
    from ligertune.models.load import hide_loading_bars

    _check(run, out)
    hide_loading_bars()
    if checkpoint is not None:
        return _from_checkpoint(run, out, checkpoint, adapter=adapter)
    model = run / "model" if (run / "model").is_dir() else run
    if not any((model / name).is_file() for name in (ADAPTER_CONFIG, "config.json")):
        raise UserError(
            f"{run} holds no finished model.", hint="Name one of its checkpoints: --checkpoint newest, or step-200."
        )
    if (model / ADAPTER_CONFIG).is_file() and not adapter:
        return _merge_folder(model, out, method=_method(run))
    if adapter and not (model / ADAPTER_CONFIG).is_file():
        raise UserError(f"{model} holds a whole model, and no adapter.", hint="Leave --adapter out.")
    _copy(model, out)
    return Exported(str(out), "adapter" if adapter else "model", str(model))


def _check(run: Path, out: Path) -> None:
    if not run.is_dir():
        raise UserError(f"There is no folder {run}.", hint="Name the output_dir of a run, or a folder with an adapter.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not an empty folder.", hint="Name another one.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out.parent} cannot be made ({error.strerror}).") from error


def _copy(model: Path, out: Path) -> None:
    """Complete or absent."""
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(model, aside)
    if out.exists():
        out.rmdir()
    os.replace(aside, out)


def _method(run: Path) -> str:
    """How the run that left an adapter trained it; lora where nothing says."""
    options = saved_options(run)
    return "lora" if options is None else options.build.method.type


def _merge_folder(folder: Path, out: Path, *, method: str) -> Exported:
    """An adapter as peft saves it -> the merged model."""
    from ligertune.models.load import read_config, whole_model
    from ligertune.models.lora import load_adapter

    spec = ModelOptions(model_name_or_path=adapter_base_model(folder))
    model = whole_model(spec, read_config(spec), through_four_bits=method == "qlora")
    _write(load_adapter(model, str(folder)).merge_and_unload(), folder, out)
    return Exported(str(out), "merged model", str(folder))


def _from_checkpoint(run: Path, out: Path, name: str, *, adapter: bool) -> Exported:
    """The weights of a checkpoint, in the model of the run's own recipe."""
    from ligertune.models.load import load_tokenizer, read_config, whole_model
    from ligertune.models.trainable import apply_method
    from ligertune.train.checkpoint.trained_weights import FILE, load_trained, load_weights

    folder = newest_checkpoint(run) if name == "newest" else run / "checkpoints" / name
    if folder is None or not folder.is_dir():
        raise UserError(f"--checkpoint: {run} has no checkpoint {name}.", hint=f"It has {_checkpoints(run)}.")
    options = saved_options(run)
    if options is None:
        raise UserError(f"--checkpoint: {run} has no resolved_recipe.yaml, so its model is not known.")
    build = options.build
    qlora = build.method.type == "qlora"
    model = whole_model(build.model, read_config(build.model), through_four_bits=qlora)
    model = apply_method(model, build.method)
    if (folder / FILE).is_file():
        load_trained(model, folder / FILE)
    elif (folder / WEIGHTS).is_file():
        load_weights(model, folder)
    else:
        raise UserError(
            f"--checkpoint: {folder} holds the shards of several ranks.",
            hint="Resume the run with --resume to its end; its model is then written whole.",
        )
    kind = "model" if not hasattr(model, "peft_config") else "adapter" if adapter else "merged model"
    model = model.merge_and_unload() if kind == "merged model" else model
    _write(model, None, out, options=options, tokenizer=load_tokenizer(build.model).tokenizer)
    return Exported(str(out), kind, str(folder))


def _checkpoints(run: Path) -> str:
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    return ", ".join(names) or "none"


def _write(
    model: PreTrainedModel,
    folder: Path | None,
    out: Path,
    *,
    options: RunOptions | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """With the tokenizer and the prompt template of `folder`, or of the run's recipe."""
    from transformers import AutoTokenizer

    from ligertune.models.save import read_prompt, write_model

    if folder is not None:
        tokenizer, prompt = AutoTokenizer.from_pretrained(folder), read_prompt(folder)
    else:
        template = {"alpaca": "alpaca"}.get(options.data.prompt_template, "chat")
        prompt = {"prompt_template": template, "system_prompt": options.data.system_prompt}
    write_model(model, tokenizer, out, state_dict=None, **prompt)
