"""The model card: README.md of exported weights, written from the run's plan, recipe and report."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from ligertune.data.templates.prompt_templates import ALPACA_PROMPT
from ligertune.errors import UserError, printable
from ligertune.files.base_model import CarriedTensors, StoredAs, TrainedBase, four_bit_format
from ligertune.files.model_files import ADAPTER_CONFIG
from ligertune.files.storage import PROMPT_FILE, mask_secrets, read_object, write_text
from ligertune.models.carried_tensors import carried_note
from ligertune.models.save import adapter_base_model, prompt_of, read_prompt
from ligertune.models.score_head import PIPELINE_TAG, SCORE_AUTO_CLASS, is_scored_class
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.options import MethodOptions, RunOptions
from ligertune.planning.preflight import looks_local
from ligertune.planning.saved_model import SavedModel, saved_options, trained_base
from ligertune.serving.server_commands import GgufNames, ServedFiles, adapter_facts, server_commands, serving_note

CARD = "README.md"
PROMPT_FORMATS = {
    "chat": "The prompt format of training is the tokenizer's chat template.",
    "alpaca": "The prompt format of training is the Alpaca prompt below, and not the chat template of the tokenizer."
    f"\n\n```text\n{ALPACA_PROMPT.format(instruction='{instruction}')}```",
    "raw": "The model was trained on texts or token ids as they were, without a prompt template.",
}
Rows = list[tuple[str, str]]


def write_card(
    folder: Path, source: SavedModel, *, is_adapter: bool, repository: str | None, gguf: GgufNames | None = None
) -> Path:
    """Write README.md into `folder` unless there is one. repository: the hub id under which users will load it.

    gguf: names of the files of GGUF in the folder.
    """
    path = folder / CARD
    if path.exists():
        return path
    try:
        text = _card(folder, source, is_adapter=is_adapter, repository=repository, gguf=gguf)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{source.run or folder}: its model card cannot be written: plan.json, report.json or ligertune.json is "
            f"damaged ({type(error).__name__}: {error}).",
            hint="Restore the file, or write README.md into the exported folder yourself.",
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, mask_secrets(text))
    return path


# transformers' class -> the hub's name of what the model does
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    SCORE_AUTO_CLASS.__name__: PIPELINE_TAG,
}


def _card(folder: Path, source: SavedModel, *, is_adapter: bool, repository: str | None, gguf: GgufNames | None) -> str:
    plan, report = (_read(source.run, file) for file in ("plan.json", "report.json"))
    options = None if source.run is None else saved_options(source.run)
    base, is_on_hub = _base_model(source, options)
    trained = trained_base(Path(source.name), source.run)
    family = plan.get("model_family", "")
    auto_class = _auto_class(source, options, takes_images="ForConditionalGeneration" in family)
    datasets = [] if options is None else [dataset.path for dataset in options.data_options.datasets]
    metadata = ModelCardData(
        base_model=base if is_on_hub else None,
        datasets=[path for path in datasets if _is_hub_id(path)] or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=PIPELINES[auto_class],
        tags=["ligertune", *([] if options is None else [_task_tag(options), options.build.method.type])],
    )
    name = repository or folder.resolve().name
    title = name.rpartition("/")[2] if repository or source.run is None else source.run.resolve().name
    prompt = _prompt(source, plan, options)
    tables = [("Base model", _base_rows(base, trained, plan, is_adapter=is_adapter))]
    tables += [] if options is None else [("Training", _training(plan, options)), ("Results", _results(report))]
    served = served_files(folder, source, is_adapter=is_adapter, address=name, base=base, name=title, gguf=gguf)
    versions = [(package, version) for package, version in report.get("versions", {}).items()]
    card = _template().render(
        metadata=metadata.to_yaml().strip(),
        title=title,
        base=base,
        checkpoint=Path(source.name).name if source.is_checkpoint else None,
        tables=[*tables, ("Versions", versions)],
        auto_class=auto_class,
        is_adapter=is_adapter,
        name=name,
        base_arguments=_base_arguments(trained),
        has_weights=gguf is None or served.has_weights,
        commands=[] if auto_class == SCORE_AUTO_CLASS.__name__ else server_commands(served),
        serving_note=serving_note(served, prompt["prompt_template"]),
        prompt_format=PROMPT_FORMATS[prompt["prompt_template"]],
        system_prompt=prompt["system_prompt"],
    )
    return printable(card)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("model_card.md.j2")


def served_files(
    folder: Path,
    source: SavedModel,
    *,
    is_adapter: bool,
    address: str,
    name: str,
    base: str,
    gguf: GgufNames | None = None,
) -> ServedFiles:
    """Return what servers load. address: where users find the folder. base: the base model as they name it."""
    place = folder if (folder / ADAPTER_CONFIG).is_file() else Path(source.name)  # of a dry run
    config = read_object(folder / "config.json") or read_object(Path(source.name) / "config.json") or {}
    return ServedFiles(
        address=address,
        name=name,
        reads_images="ForConditionalGeneration" in (config.get("architectures") or [""])[0],
        adapter=adapter_facts(place, trained_base(Path(source.name), source.run)) if is_adapter else None,
        base=base,
        has_weights=gguf is None or (folder / "config.json").is_file(),
        gguf=gguf,
    )


def _task_tag(options: RunOptions) -> str:
    return feature_of(options.build.task).card_tag


def _auto_class(source: SavedModel, options: RunOptions | None, *, takes_images: bool) -> str:
    """Return the name of transformers' class that loads the model."""
    architectures = (read_object(Path(source.name) / "config.json") or {}).get("architectures") or [""]
    if is_scored_class(architectures[0]) or (options is not None and feature_of(options.build.task).scores_texts):
        return SCORE_AUTO_CLASS.__name__
    return "AutoModelForImageTextToText" if takes_images else "AutoModelForCausalLM"


def _read(run: Path | None, file: str) -> dict[str, Any]:
    path = None if run is None else run / file
    return (path and read_object(path)) or {}


def _is_hub_id(name: str) -> bool:
    return not looks_local(name) and not Path(name).exists()


def _base_model(source: SavedModel, options: RunOptions | None) -> tuple[str, bool]:
    """Return (hub id of the base model, or the bare name of its folder; whether it is a hub id)."""
    if options is not None:
        base = options.build.model.model_name_or_path
    elif (Path(source.name) / ADAPTER_CONFIG).is_file():
        base = adapter_base_model(Path(source.name))
    else:
        return "A base model that is not recorded", False
    return (base, True) if _is_hub_id(base) else (Path(base).name, False)


def _base_rows(name: str, base: TrainedBase | None, plan: dict[str, Any], *, is_adapter: bool) -> Rows:
    """Return what the base model was while it was trained: revision, dtype, quantisation, tensors that are not loaded.

    plan: of the run. is_adapter: the card is that of an adapter alone.
    """
    if base is None:
        return []
    values = plan.get("carried") or {"names": (), "bytes": 0, "dropped": ""}
    carried = CarriedTensors(tuple(values["names"]), values["bytes"], values["dropped"])
    rows = [
        ("model", name),
        ("revision", base.revision),
        ("fingerprint of its files", base.fingerprint),
        ("dtype as trained", base.dtype),
        ("quantisation", _quantisation(base.stored_as)),
        ("rotary embeddings", _rope(base.rope_parameters, is_adapter=is_adapter)),
    ]
    if base.quantization is not None:
        rows.append(("quantisation of its files", f"{base.quantization}; computed in {base.dtype} for training"))
    rows.append(("tensors that its class does not load", carried_note(carried, adapts=is_adapter)))
    return [(key, value) for key, value in rows if value]


def _rope(changed: dict[str, Any] | None, *, is_adapter: bool) -> str:
    """Return the changed parameters of rotary embeddings; an adapter's base must be given them."""
    words = ", ".join(f"{key}: {value}" for key, value in (changed or {}).items())
    return f"{words}; write them into the base's config.json (rope_parameters)" if words and is_adapter else words


def _quantisation(stored_as: StoredAs | None) -> str:
    """Return how the base model was quantised."""
    if stored_as is None:
        return "none"
    found = four_bit_format(stored_as)
    if found is None:
        return "to 8 bits (int8) while it was trained"
    quant_type, double_quant = found
    kind = quant_type.upper() if double_quant else f"{quant_type.upper()} without double quantisation"
    return f"to 4 bits ({kind}) while it was trained"


def _base_arguments(base: TrainedBase | None) -> str:
    """Return the further arguments of from_pretrained that load the base model as it was trained."""
    if base is None:
        return ""
    revision = "" if base.revision is None else f', revision="{base.revision}"'
    return f', dtype="{base.dtype}"{revision}'


def _prompt(source: SavedModel, plan: dict[str, Any], options: RunOptions | None) -> dict[str, Any]:
    if options is not None and not (Path(source.name) / PROMPT_FILE).is_file():  # a checkpoint
        return prompt_of(plan["data"]["template"], options.data_options)
    return read_prompt(Path(source.name))


def _training(plan: dict[str, Any], options: RunOptions) -> Rows:
    data = plan["data"]
    rows = plan["rows"]
    batching = plan["batching"]
    schedule = plan["schedule"]
    optimizer = plan["optimizer"]
    precision = plan["precision"]
    sets = [path if _is_hub_id(path) else f"{Path(path).name} (a local file)" for path in
            (dataset.path for dataset in options.data_options.datasets)]  # fmt: skip
    autocast = "" if precision["autocast"] == "no" else f", autocast to {precision['autocast']}"
    return [
        ("data", ", ".join(sets)),
        ("examples", f"{data['examples']:,} ({data['tokens']:,} tokens, {data['trained_tokens']:,} of them trained)"),
        ("prompt template", data["template"]),
        ("method", _method(options.build.method)),
        ("parameters", f"{plan['n_parameters']:,}, {plan['n_trainable']:,} of them trained"),
        ("steps", f"{schedule['total_steps']:,}, {schedule['warmup_steps']} of them warm-up"),
        ("rows per step", f"{batching['global_batch_size']} ({rows['kind']}, at most {rows['length']:,} tokens)"),
        ("learning rate", f"{schedule['learning_rate']:g}, {schedule['type']}"),
        ("optimizer", f"{optimizer['name']}, weight decay {optimizer['weight_decay']:g}"),
        ("gradient norm clipped at", f"{optimizer['max_grad_norm']:g}"),
        ("precision", f"{precision['weights']} weights{autocast}"),
        ("seed", str(options.build.seed)),
    ]


def _method(method: MethodOptions) -> str:
    if method.type not in ("lora", "qlora"):
        return {"full": "full fine-tuning", "freeze": "full fine-tuning of a part of the layers"}.get(
            method.type, method.type
        )
    kind = f"{'Q' if method.type == 'qlora' else ''}{'DoRA' if method.use_dora else 'LoRA'}"
    targets = method.lora_target_modules
    where = targets if isinstance(targets, str) else ", ".join(targets)
    if method.lora_target_parameters is not None:
        where += f"; parameters: {', '.join(method.lora_target_parameters) or 'none'}"
    kind = f"{kind} on 8-bit weights" if method.load_in_8bit else kind
    return f"{kind}, rank {method.lora_r}, alpha {method.lora_alpha:g}, dropout {method.lora_dropout:g}, on {where}"


def _results(report: dict[str, Any]) -> Rows:
    """Return rows for what the report holds; reports of earlier versions hold less."""
    rows = [
        (name, f"{report[key]:.4f}")
        for name, key in (
            ("loss before training", "loss_before_training"),
            ("loss, first logged interval", "loss_first"),
            ("loss, last logged interval", "loss_last"),
            ("evaluation loss before training", "eval_loss_before_training"),
            ("evaluation loss", "eval_loss"),
        )
        if report.get(key) is not None
    ]
    if report.get("throughput"):
        rate = report["throughput"]["tokens_per_second"]
        devices = f"{report['world_size']} x {report['device']}"
        rows.append(("speed", f"{rate:,.0f} tokens/s without padding on {devices}, {report['strategy']}"))
    if report.get("ended"):
        rows.append(("trained", report["ended"][:10]))
    return rows
