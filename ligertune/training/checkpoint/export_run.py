"""`ligertune export`: write a run's adapter, checkpoint or model as a folder that other tools load, and upload it.

An adapter is merged into its base weights, or copied alone. A checkpoint becomes the model as it was after that step,
in Hugging Face's format. Merging adds s B A to W in float32 and rounds once to W's dtype. QLoRA adapters are merged
into the dequantised 4-bit weights that they were trained on, and not into the original weights. Weights of a base that
is quantised already are dequantised, too.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file
from torch import Tensor

from ligertune.any_types import AnyModule
from ligertune.errors import UserError, message_of
from ligertune.files.base_model import CarriedTensors, TrainedBase
from ligertune.files.hub import MODEL_FILES
from ligertune.files.model_files import ADAPTER_CONFIG
from ligertune.files.storage import new_folder, newest_checkpoint, read_object, write_bytes, writing
from ligertune.models.adapters.initial_lora import keep_initial
from ligertune.models.carried_tensors import carried_note
from ligertune.models.load import carried_by, hide_loading_bars
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.save import (
    SAVED_MODEL,
    adapter_base_model,
    base_as_trained,
    check_same_base,
    check_saved,
    in_dtype,
    merge_saved_adapter,
    prompt_of,
    read_prompt,
    read_whole_model,
    write_model,
)
from ligertune.models.score_head import is_scored_class
from ligertune.models.trainable import apply_method
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.options import BuildOptions, MethodOptions, ModelOptions, RunOptions
from ligertune.planning.preflight import check_out_folder, make_out_folder
from ligertune.planning.saved_model import SavedModel, find_saved_model, saved_options, trained_base
from ligertune.serving.server_commands import GgufNames, server_commands, serving_note
from ligertune.training.checkpoint.checkpoint_record import damage_of
from ligertune.training.checkpoint.load_checkpoint import explain_unusable
from ligertune.training.checkpoint.model_card import CARD, served_files, write_card
from ligertune.training.checkpoint.weight_files import TRAINED_FILE, load_trained

if TYPE_CHECKING:
    from ligertune.models.adapters.four_bit_residual import InitialLora

ExportKind = Literal["merged model", "adapter", "model"]
ExportStep = Literal["in place", "there already", "copy", "convert", "merge", "checkpoint"]
DTYPES = ("bfloat16", "float16", "float32")
WEIGHTS = "model.safetensors"  # in a checkpoint without frozen weights


@dataclass(frozen=True)
class ExportPlan:
    """What is exported, and how. In place: the folder is uploaded as it is. There already: it was exported before.

    dtype: of the written weights; None: that of training, or of the files.
    """

    source: SavedModel
    folder: Path
    kind: ExportKind
    how: ExportStep
    trust_remote_code: bool = False
    dtype: str | None = None

    def write(self) -> str:
        """Write the folder, and return a note on its weights. Raises UserError."""
        if self.how in ("in place", "there already"):
            return ""
        hide_loading_bars()
        with writing(f"The export to {self.folder}", trains=False):
            return self._write()

    def _write(self) -> str:
        card = self.folder / CARD
        text = card.read_bytes() if card.is_file() else None  # of a dry run, perhaps filled in
        note = ""
        if self.how == "copy":
            with new_folder(self.folder) as partial:
                shutil.copytree(self.source.name, partial, dirs_exist_ok=True)
        elif self.how == "convert":
            note = _convert_model(self)
        elif self.how == "merge":
            note = _merge_adapter_folder(self)
        else:
            note = _export_checkpoint(self)
        if text is not None:
            write_bytes(card, text)
        return note

    @property
    def upload_warning(self) -> str:
        """What users of the uploaded files will miss, or an empty string."""
        base = adapter_base_model(Path(self.source.name)) if self.kind == "adapter" and self.how != "checkpoint" else ""
        if not base or not Path(base).exists():
            return ""
        return f"adapter_config.json names the folder {base} as base model, which users of the upload do not have."

    def write_card(self, repository: str | None, gguf: GgufNames | None = None) -> Path:
        """Write README.md unless there is one. gguf: files of the folder. Raises UserError."""
        return write_card(self.folder, self.source, is_adapter=self.kind == "adapter", repository=repository, gguf=gguf)

    def serve(self, gguf: GgufNames | None = None) -> tuple[list[tuple[str, str]], str]:
        """Return (server, command) of each server that loads the written folder, and a note. gguf: files of it."""
        is_adapter = self.kind == "adapter"
        config = read_object(self.folder / "config.json") or {}
        if is_scored_class((config.get("architectures") or [""])[0]):
            return [], ""
        files = served_files(
            self.folder,
            self.source,
            is_adapter=is_adapter,
            address=str(self.folder),
            name=(self.source.run or self.folder).resolve().name,
            base=adapter_base_model(self.folder) if is_adapter else "",
            gguf=gguf,
        )
        return server_commands(files), serving_note(files, read_prompt(self.folder)["prompt_template"])


def plan_export(
    name: str,
    out: Path | None,
    *,
    adapter: bool,
    checkpoint: str | None,
    in_place: bool = False,
    check: bool = False,
    trust_remote_code: bool = False,
    dtype: str | None = None,
) -> ExportPlan:
    """Return what an export will do, from the folder of a run, a model, an adapter or a checkpoint. Raises UserError.

    adapter: keep the adapter instead of merging it. checkpoint: a name like step-200, or newest. in_place: a model that
    needs neither merging nor converting stays in its folder unless `out` names another. check: `out` may hold an
    earlier export, which is then compared as it is. dtype: name of that of the weights.
    """
    source = find_source(name, checkpoint)
    folder = Path(source.name)
    has_adapter = _has_adapter(source)
    if adapter and not has_adapter:
        raise UserError(f"{folder} holds a whole model, and no adapter.", hint="Leave --adapter out.")
    kind: ExportKind = "model" if not has_adapter else "adapter" if adapter else "merged model"
    how = _step_of(source, kind, dtype)
    if how == "copy":
        check_saved(folder, trust_remote_code=trust_remote_code)
        if in_place and out is None:
            return ExportPlan(source, folder, kind, "in place")
    out = out or (source.run or folder) / "exported"
    if check and any((out / file).is_file() for file in MODEL_FILES):
        _check_earlier(out, kind)
        return ExportPlan(source, out, kind, "there already", trust_remote_code, dtype)
    _check_out(out)
    return ExportPlan(source, out, kind, how, trust_remote_code, dtype)


def _step_of(source: SavedModel, kind: ExportKind, dtype: str | None) -> ExportStep:
    """Return how a folder is exported. Raises UserError for a dtype that it cannot have."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype} is not one of {', '.join(DTYPES)}.")
    if dtype is not None and kind == "adapter":
        raise UserError("--dtype: an adapter is written as it was trained, in float32.", hint="Leave one out.")
    if source.is_checkpoint:
        return "checkpoint"
    if kind == "merged model":
        return "merge"
    return "copy" if dtype is None else "convert"


def _has_adapter(source: SavedModel) -> bool:
    """Return whether a saved model is an adapter on a base. Raises UserError if its run does not say."""
    if not source.is_checkpoint:
        return (Path(source.name) / ADAPTER_CONFIG).is_file()
    return _run_of_checkpoint(source)[1].build.method.type in ("lora", "qlora")


def _run_of_checkpoint(source: SavedModel) -> tuple[Path, RunOptions]:
    """Return the run that wrote a checkpoint, and its options. Raises UserError if it does not say them."""
    assert source.run is not None  # a checkpoint is found through its run, or its path names it
    options = saved_options(source.run)
    if options is None:
        raise UserError(f"--checkpoint: {source.run} has no resolved_recipe.yaml, so its model is not known.")
    return source.run, options


def find_source(name: str, checkpoint: str | None) -> SavedModel:
    """Return the folder to export: of a run, a model or an adapter, or the checkpoint of a run. Raises UserError."""
    run = Path(name).expanduser()
    if checkpoint is None or not run.is_dir():
        source = find_saved_model(name, key="RUN")
        if not run.is_dir():
            raise UserError(f"RUN: there is no folder {name}.", hint="Name the folder of a run or of an adapter.")
        return source
    folder = newest_checkpoint(run) if checkpoint == "newest" else run / "checkpoints" / checkpoint
    if folder is None or not folder.is_dir():
        names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
        raise UserError(
            f"--checkpoint: {run} has no checkpoint {checkpoint}.", hint=f"It has {', '.join(names) or 'none'}."
        )
    return SavedModel(str(folder), run, is_checkpoint=True)


def _check_earlier(out: Path, kind: ExportKind) -> None:
    if (out / ADAPTER_CONFIG).is_file() != (kind == "adapter"):
        raise UserError(
            f"--check: {out} holds {'a whole model' if kind == 'adapter' else 'an adapter'}, and the export is"
            f" {'an adapter' if kind == 'adapter' else 'a whole model'}.",
            hint="Name another folder with --out.",
        )


def _check_out(out: Path) -> None:
    check_out_folder(out, "--out", may_hold=(CARD,))
    make_out_folder(out.parent, "--out")


def _merge_adapter_folder(plan: ExportPlan) -> str:
    """Merge an adapter that peft has saved, and return a note. Without a saved recipe it counts as LoRA."""
    folder = Path(plan.source.name)
    base = source_base(plan.source)
    merged, tokenizer, carried = merge_saved_adapter(
        folder, base, trust_remote_code=plan.trust_remote_code, dtype=plan.dtype
    )
    prompt = read_prompt(folder)
    write_model(merged, tokenizer, plan.folder, state_dict=None, prompt=prompt, base=base, carried=carried)
    return _said(carried)


def _convert_model(plan: ExportPlan) -> str:
    """Write a whole model in another dtype, dequantised if its checkpoint is quantised, and return a note."""
    folder = Path(plan.source.name)
    assert plan.dtype is not None
    model, tokenizer, carried = read_whole_model(folder, plan.dtype, trust_remote_code=plan.trust_remote_code)
    prompt = read_prompt(folder)
    write_model(model, tokenizer, plan.folder, state_dict=None, prompt=prompt, carried=carried)
    return _said(carried)


def _said(carried: tuple[ModelOptions, CarriedTensors] | None) -> str:
    return "" if carried is None else carried_note(carried[1], adapts=False)


def source_base(source: SavedModel) -> TrainedBase | None:
    """Return the base that an adapter or a checkpoint was trained on; None if neither it nor its run says it."""
    folder = Path(source.name)
    base = trained_base(folder, source.run)
    options = saved_options(source.run or folder)
    if options is None or (base is not None and base.name):
        return base
    # A run of an earlier version has recorded the dtype only, in plan.json.
    build = options.build
    return None if base is None else TrainedBase(build.model.model_name_or_path, base.dtype, build.method.stored_as)


def spec_of_base(build: BuildOptions, base: TrainedBase | None, *, trust_remote_code: bool) -> ModelOptions:
    """Return how to load the base of a run in the revision that was trained. Raises UserError if its files changed."""
    revision = build.model.revision if base is None or base.revision is None else base.revision
    spec = build.model.model_copy(update={"trust_remote_code": trust_remote_code, "revision": revision})
    check_same_base(spec, base)
    return spec


def load_checkpoint(source: SavedModel, *, trust_remote_code: bool) -> AnyModule:
    """Return the model of the run's recipe with the weights of a checkpoint; with its adapter, not merged.

    Raises UserError for a damaged checkpoint, and for one that holds shards.
    """
    folder = Path(source.name)
    build = _run_of_checkpoint(source)[1].build
    base = source_base(source)
    damage = damage_of(folder, only=(TRAINED_FILE, WEIGHTS))
    if damage is not None:
        raise UserError(f"--checkpoint: {folder} is damaged: {damage}.", hint="Export an earlier checkpoint.")
    spec = spec_of_base(build, base, trust_remote_code=trust_remote_code)
    config = read_config(spec, SAVED_MODEL)
    feature_of(build.task).prepare_config(config, build, SAVED_MODEL)
    weights = folder / TRAINED_FILE
    starts_from_residual = build.method.residual_of is not None and weights.is_file()
    with explain_unusable(folder):
        saved = load_file(weights) if starts_from_residual else {}
    model = apply_method(
        base_as_trained(spec, config, base, initial=_initial_of(saved, build.method)), build.method, seed=build.seed
    )
    if not any((folder / name).is_file() for name in (TRAINED_FILE, WEIGHTS)):
        raise UserError(
            f"--checkpoint: {folder} holds the shards of several ranks.",
            hint="Resume the run with --resume to its end; its model is then written whole.",
        )
    with explain_unusable(folder):
        if (folder / TRAINED_FILE).is_file():
            load_trained(model, folder / TRAINED_FILE)
        else:
            load_checkpoint_in_model(model, str(folder))
            model.tie_weights()  # a checkpoint stores tied weights once
    if saved:
        keep_initial(model, saved)
    return model


def _initial_of(saved: dict[str, Tensor], method: MethodOptions) -> dict[str, InitialLora] | None:
    """Return the initial adapters of a checkpoint whose 4-bit weights are the rest; saved: its tensors, or none."""
    if not saved:
        return None
    from ligertune.models.adapters.four_bit_residual import initial_of_checkpoint  # imports peft, which takes seconds

    return initial_of_checkpoint(saved, alpha=method.lora_alpha, rslora=method.use_rslora)


def _export_checkpoint(export: ExportPlan) -> str:
    """Write the model of a checkpoint in Hugging Face's format, and return a note."""
    source = export.source
    trust_remote_code = export.trust_remote_code
    run, options = _run_of_checkpoint(source)
    model = load_checkpoint(source, trust_remote_code=trust_remote_code)
    if export.kind == "merged model":
        from ligertune.models.adapters.lora import merged_model  # imports peft, which takes seconds

        model = merged_model(model)
    model = model if export.dtype is None else in_dtype(model, export.dtype)
    plan = read_object(run / "plan.json") or {}  # it has the template that auto chose
    template = plan["data"].get("template") if isinstance(plan.get("data"), dict) else None
    if not isinstance(template, str):
        raise UserError(f"--checkpoint: {run / 'plan.json'} is missing or damaged, so its prompt is not known.")
    base = source_base(source)
    spec = spec_of_base(options.build, base, trust_remote_code=trust_remote_code)
    prompt = prompt_of(template, options.data_options)
    config = read_config(spec, SAVED_MODEL)
    feature_of(options.build.task).prepare_config(config, options.build, SAVED_MODEL)
    found = None if export.kind == "adapter" else carried_by(spec, config, origin=SAVED_MODEL)
    carried = None if found is None else (spec, found)
    tokenizer = load_tokenizer(spec).tokenizer
    write_model(model, tokenizer, export.folder, state_dict=None, prompt=prompt, base=base, carried=carried)
    return _said(carried)


# ---- upload

# States of optimizers, schedulers and random numbers, which trainers write next to the weights.
NOT_UPLOADED = (
    "optimizer", "scheduler", "random_states", "rng_state", "scaler", "trainer_state", "training_args", "progress.json",
)  # fmt: skip


def files_to_upload(folder: Path) -> dict[str, int]:
    """Return {name: bytes} of a model folder's own files; folders in it, such as checkpoints, are left out."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: path.stat().st_size for path in files if not path.name.startswith(NOT_UPLOADED)}


def check_repository(name: str) -> None:
    """Raise UserError if a name cannot be that of a repository on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, without an __all__

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push: {name} is not a name of a repository.", hint="Write USER/NAME.") from error
    if name.count("/") != 1:
        raise UserError(f"--push: {name} names no user or organisation.", hint="Write USER/NAME.")


def upload(folder: Path, repository: str, *, public: bool) -> str:
    """Upload a model folder to the hub, into a new private repository unless it is there; return its address."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(files_to_upload(folder)),
            commit_message="Upload a model trained with ligertune",
        )
    except (HTTPError, OSError) as problem:
        raise UserError(
            f"--push: {repository} could not be uploaded: {message_of(problem)}",
            hint=f"Check the network and the login (`hf auth login`), then: ligertune export {folder} --push"
            f" {repository}",
            exit_code=1,
        ) from problem
    return str(address)
