"""`ligertune export`: write a run's adapter, checkpoint or model as a folder that other tools load.

An adapter is merged into its base weights, or copied alone. A checkpoint becomes the model as it was after that step,
in Hugging Face's format. Merging adds s B A to W in float32 and rounds once to W's dtype. QLoRA adapters are merged
into the dequantised 4-bit weights that they were trained on, and not into the original weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from accelerate import load_checkpoint_in_model
from transformers import AutoTokenizer

from ligertune.errors import UserError
from ligertune.models.load import hide_loading_bars, load_tokenizer, read_config, whole_model
from ligertune.models.save import ADAPTER_CONFIG, adapter_base_model, prompt_of, read_prompt, write_model
from ligertune.models.trainable import apply_method
from ligertune.planning.options import ModelOptions, saved_options
from ligertune.storage import newest_checkpoint, put_in_place, remove
from ligertune.train.checkpoint.trained_weights import FILE, load_trained

WEIGHTS = "model.safetensors"  # in a checkpoint without frozen weights


@dataclass(frozen=True)
class Exported:
    """What was written, and from which folder."""

    folder: str
    kind: str  # "merged model", "adapter", "model"
    source: str


def export_run(run: Path, out: Path, *, adapter: bool, checkpoint: str | None) -> Exported:
    """Write `out` from the folder of a run, or from a folder that holds an adapter.

    adapter: keep the adapter instead of merging it. checkpoint: a name like step-200, or newest. Raises UserError.
    """
    _check(run, out)
    hide_loading_bars()
    if checkpoint is not None:
        return _export_checkpoint(run, out, checkpoint, adapter=adapter)
    model = run / "model" if (run / "model").is_dir() else run
    has_adapter = (model / ADAPTER_CONFIG).is_file()
    if not has_adapter and not (model / "config.json").is_file():
        raise UserError(
            f"{run} holds no finished model.", hint="Name one of its checkpoints: --checkpoint newest, or step-200."
        )
    if has_adapter and not adapter:
        return _merge_adapter_folder(run, model, out)
    if adapter and not has_adapter:
        raise UserError(f"{model} holds a whole model, and no adapter.", hint="Leave --adapter out.")
    partial = out.with_name(f".{out.name}.partial")
    remove(partial)
    shutil.copytree(model, partial)
    put_in_place(partial, out)
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


def _merge_adapter_folder(run: Path, folder: Path, out: Path) -> Exported:
    """Merge an adapter that peft has saved. Without a saved recipe it counts as LoRA."""
    from ligertune.models.lora import load_adapter  # imports peft, which takes seconds

    options, spec = saved_options(run), ModelOptions(model_name_or_path=adapter_base_model(folder))
    qlora = options is not None and options.build.method.type == "qlora"
    model = whole_model(spec, read_config(spec), through_four_bits=qlora)
    merged = load_adapter(model, str(folder)).merge_and_unload()
    write_model(merged, AutoTokenizer.from_pretrained(folder), out, state_dict=None, **read_prompt(folder))
    return Exported(str(out), "merged model", str(folder))


def _export_checkpoint(run: Path, out: Path, name: str, *, adapter: bool) -> Exported:
    """Load the weights of a checkpoint into the model of the run's recipe, and write it."""
    folder = newest_checkpoint(run) if name == "newest" else run / "checkpoints" / name
    if folder is None or not folder.is_dir():
        names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
        raise UserError(f"--checkpoint: {run} has no checkpoint {name}.", hint=f"It has {', '.join(names) or 'none'}.")
    options = saved_options(run)
    if options is None:
        raise UserError(f"--checkpoint: {run} has no resolved_recipe.yaml, so its model is not known.")
    build = options.build
    model = whole_model(build.model, read_config(build.model), through_four_bits=build.method.type == "qlora")
    model = apply_method(model, build.method)
    if (folder / FILE).is_file():
        load_trained(model, folder / FILE)
    elif (folder / WEIGHTS).is_file():
        load_checkpoint_in_model(model, str(folder))
        model.tie_weights()  # a checkpoint stores tied weights once
    else:
        raise UserError(
            f"--checkpoint: {folder} holds the shards of several ranks.",
            hint="Resume the run with --resume to its end; its model is then written whole.",
        )
    kind = "model" if not hasattr(model, "peft_config") else "adapter" if adapter else "merged model"
    model = model.merge_and_unload() if kind == "merged model" else model
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))  # it has the template that auto chose
    prompt = prompt_of(plan["data"]["template"], options.data_options.system_prompt)
    write_model(model, load_tokenizer(build.model).tokenizer, out, state_dict=None, **prompt)
    return Exported(str(out), kind, str(folder))
