"""What `ligertune eval` evaluates: a model, the recipe that reads its data, and the base model next to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.evaluation.eval_options import EvalOptions
from ligertune.files.storage import PROMPT_FILE
from ligertune.hardware import this_machine
from ligertune.models.load import stored_dtype
from ligertune.models.save import adapter_base_model, is_adapter, read_prompt, read_saved_config, saved_spec
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.saved_model import check_can_generate, find_saved_model, trained_base
from ligertune.recipe.feature import modality_parts, part_of_task
from ligertune.recipe.read import load_recipe, recipe_of
from ligertune.recipe.schema import Recipe

KEY = "TARGET"  # the argument that messages name
RECIPE_SUFFIXES = (".yaml", ".yml")
_DEFAULT_TASK = Recipe.model_fields["task"].default


@dataclass(frozen=True)
class EvalTarget:
    """A model to evaluate.

    model: its folder or hub id. run: output_dir of the run that trained it. base: the model before training: a folder
    or hub id; None: there is none, or it is the model with its adapter switched off. recipe: of the evaluation; its
    data sets are those to evaluate on, unless `held_out` of them are. trained: the recipe of the run, if there is one.
    """

    model: str
    run: Path | None
    has_adapter: bool
    base: str | None
    recipe: Recipe
    held_out: bool
    trained: Recipe | None

    @property
    def base_name(self) -> str | None:
        """The name of the base model; None if there is none."""
        return adapter_base_model(Path(self.model).expanduser()) if self.has_adapter else self.base


def find_target(name: str, options: EvalOptions, *, texts: Path | None = None) -> EvalTarget:
    """Return the model that `name` means: a run, a recipe, a model or an adapter. Raises UserError.

    texts: a file of texts in place of data, for tasks that bring their own.
    """
    given = None
    path = Path(name).expanduser()
    if path.suffix in RECIPE_SUFFIXES:
        given = load_recipe(path)
        run = Path(given.checkpoint.output_dir)
        if not (run / "model").is_dir():
            raise UserError(
                f"{KEY}: {name} has trained no model: there is no folder {run / 'model'}.",
                hint=f"Train it, or evaluate its base model: ligertune eval {given.model.model_name_or_path} --data "
                "FILE.",
            )
        name = str(run)
    saved = find_saved_model(name, key=KEY)
    check_can_generate(saved, key=KEY)
    trained = _recipe_of_run(saved.run)
    if trained is None and not options.data and texts is None:
        raise UserError(f"{KEY}: {name} is no run, so no data belong to it.", hint="Name a file: --data FILE.")
    if trained is not None and feature_of(trained.task).save is not None:
        raise UserError(
            f"{KEY}: task: {trained.task} trains parts next to a model, which eval does not load.",
            hint=f"Measure them: ligertune {trained.task} RECIPE --report",
        )
    has_adapter = is_adapter(Path(saved.name).expanduser())
    sections = _sections(saved.name, trained, has_adapter=has_adapter, options=options)
    if texts is None:
        sections["data"], held_out = _data(given or trained, options)
        if trained is None:
            sections["data"] |= _saved_prompt(Path(saved.name).expanduser())
    else:
        _check_writes_text(name, trained)
        sections |= {"task": _DEFAULT_TASK, "data": _texts(texts)}
        held_out = False
    base = None
    if trained is not None and not has_adapter and trained.model.init == "pretrained":
        base = trained.model.model_name_or_path
    recipe = recipe_of(sections, options.overrides)
    return EvalTarget(saved.name, saved.run, has_adapter, base, recipe, held_out, trained)


def _saved_prompt(folder: Path) -> dict[str, Any]:
    """Return the keys of `data` with the prompt that a model of ours was trained with; nothing for another model."""
    if not (folder / PROMPT_FILE).is_file():
        return {}
    prompt = read_prompt(folder)
    template = {"raw": "auto"}.get(prompt["prompt_template"], prompt["prompt_template"])
    found = {"prompt_template": template, "system_prompt": prompt["system_prompt"]}
    return found | {"chat_template_kwargs": prompt.get("chat_template_kwargs", {})}


def _check_writes_text(name: str, trained: Recipe | None) -> None:
    if trained is not None and feature_of(trained.task).scores_texts:
        raise UserError(
            f"{KEY}: {name} scores texts and writes none, and tasks need a model that writes text.",
            hint="Evaluate it on data: leave --tasks out.",
        )


def _texts(file: Path) -> dict[str, Any]:
    return {"datasets": [{"path": str(file), "format": "text"}], "cache": False, "num_proc": 1}


def _recipe_of_run(run: Path | None) -> Recipe | None:
    if run is None or not (run / "resolved_recipe.yaml").is_file():
        return None
    return load_recipe(run / "resolved_recipe.yaml")


def _sections(name: str, trained: Recipe | None, *, has_adapter: bool, options: EvalOptions) -> dict[str, Any]:
    """Return the sections of the evaluation's recipe without `data`: the model as it was saved, and its task."""
    folder = Path(name).expanduser()
    sections: dict[str, Any] = {"checkpoint": {"output_dir": str(folder)}}
    spec = saved_spec(name, trust_remote_code=options.trust_remote_code)
    model: dict[str, Any] = {}
    if trained is not None:
        written = trained.model_dump(mode="json")
        sections |= _of_task(trained, written)
        model = written["model"]
        sections["kernels"] = {**written["kernels"], "recompute": False}
        sections["train"] = {"seed": trained.train.seed}  # it decides which examples val_split holds out
        if has_adapter:
            sections["method"] = written["method"]
        else:  # the saved model holds all that training has changed
            sections["kernels"]["lora"] = "auto"
            model = {"attn_implementation": model["attn_implementation"]}
    if not has_adapter:
        model["model_name_or_path"] = name
    elif trained is None:
        model["model_name_or_path"] = spec.model_name_or_path
        model["tokenizer"] = {"path": spec.tokenizer.path}
    model["trust_remote_code"] = options.trust_remote_code
    model["dtype"] = _loaded_dtype(name, options)
    sections["model"] = model
    if options.batch_size is not None:
        sections["eval"] = {"per_device_eval_batch_size": options.batch_size}
    elif trained is not None:
        sections["eval"] = {"per_device_eval_batch_size": trained.eval.per_device_eval_batch_size}
    return sections


def _of_task(trained: Recipe, written: dict[str, Any]) -> dict[str, Any]:
    """Return the task and its sections, and those of modalities. A task on ordinary texts is evaluated as one."""
    part = part_of_task(trained.task)
    names = [name for modality in modality_parts() for name in modality.sections]
    if not part.brings_rows:
        return {"task": _DEFAULT_TASK, **{name: written[name] for name in names}}
    return {"task": trained.task, **{name: written[name] for name in (*names, *part.sections)}}


def _loaded_dtype(name: str, options: EvalOptions) -> str:
    """Return the dtype in which a model is evaluated: that of training, or of its files; on a CPU not float16."""
    folder = Path(name).expanduser()
    base = trained_base(folder) if is_adapter(folder) else None
    found: str
    if base is not None:
        found = base.dtype
    else:
        config = read_saved_config(name, saved_spec(name, trust_remote_code=options.trust_remote_code))
        found = str(stored_dtype(config)).removeprefix("torch.")
    return "float32" if found == "float16" and this_machine().vendor == "cpu" else found


def _data(recipe: Recipe | None, options: EvalOptions) -> tuple[dict[str, Any], bool]:
    """Return the section `data` of the evaluation, and whether its data sets hold out the examples to evaluate on."""
    written = {} if recipe is None else recipe.model_dump(mode="json")["data"]
    held_out = False
    if options.data:
        sets: list[dict[str, Any]] = [{"path": path, "split": options.split} for path in options.data]
    elif written["eval_datasets"]:
        sets = written["eval_datasets"]
    elif written["val_split"]:
        sets = written["datasets"]
        held_out = True
    else:
        raise UserError(
            f"{KEY}: the run held no data out (data.val_split, data.eval_datasets).",
            hint="Name other data than it trained on: --data FILE. For the next run, write data.val_split: 0.05.",
        )
    if options.max_samples is not None and not held_out:  # with fewer rows, other examples would be held out
        sets = [{**one, "max_samples": options.max_samples} for one in sets]
    changed = {"datasets": sets, "eval_datasets": [], "streaming": False}
    if not held_out:
        changed["datasets"] = [{**one, "weight": 1.0} for one in sets]
        changed |= {"val_split": 0.0, "interleave": {}}
    return {**written, **changed}, held_out
