"""Medusa runs: add heads to the model, save the trained heads, and measure them on held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligertune.data.prepare import PreparedData, prepare
from ligertune.decode.speculative.candidate_tree import best_paths, chain
from ligertune.errors import UserError
from ligertune.features.medusa.heads import NEEDS_PLAIN_HEAD
from ligertune.features.medusa.heads_files import (
    HeadsConfig,
    ServedModel,
    base_model_of,
    base_of_heads,
    read_heads,
    write_choices,
    write_heads,
)
from ligertune.features.medusa.medusa_model import MedusaModel, attach_heads
from ligertune.features.medusa.medusa_report import MedusaReport, head_accuracy, measure_heads, write_report
from ligertune.features.medusa.recipe import HEADS_FOLDER, MedusaSpec
from ligertune.features.output_head import backbone_of, check_plain_head, logit_transform
from ligertune.features.task import examples_in_memory
from ligertune.hardware import this_machine
from ligertune.models.load import build_model, hide_loading_bars, whole_model
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.score_head import lm_head_of
from ligertune.models.shape import base_of
from ligertune.models.trainable import apply_method
from ligertune.patching.packing_checks import prepare_masks
from ligertune.planning.precision import choose_precision
from ligertune.planning.preflight import check_run_files, check_trained_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.data.examples import Examples
    from ligertune.features.task import TrainedModel
    from ligertune.planning.options import BuildOptions, RunOptions
    from ligertune.planning.plan import Plan

MAX_EXAMPLES = 256  # held-out examples that accuracy is measured on, at most
BASE = "base_model."  # prefix of the base model's parameters in a MedusaModel


def with_heads(options: BuildOptions, model: PreTrainedModel) -> MedusaModel:
    """Return the model with its Medusa heads. MedusaModel calls the backbone directly, so its hooks are set there."""
    prepare_masks(backbone_of(model))
    return attach_heads(model, options.section(MedusaSpec), fused=options.kernels.fuses_heads_loss)


def of_base(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the base model's weights from those of a MedusaModel."""
    return {name.removeprefix(BASE): t for name, t in weights.items() if name.startswith(BASE)}


def merge_adapter(
    plan: Plan, config: PreTrainedConfig, model: MedusaModel, weights: dict[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """Merge the adapter into the base model, because heads are served with one model; return the new weights.

    weights: the gathered weights of a sharded model, which are merged in an unsharded copy of the base model; without
    them `model` changes in place.
    """
    from ligertune.models.adapters.lora import merged_model  # imports peft, which takes seconds

    if weights is None:
        model.base_model = merged_model(model.base_model)
        return None
    options = plan.build
    adapted = apply_method(whole_model(options.model, config, trained_in=plan.precision.weights), options.method)
    adapted.load_state_dict(of_base(weights))
    base = {f"{BASE}{name}": t for name, t in merged_model(adapted).state_dict().items()}
    return base | {name: t for name, t in weights.items() if not name.startswith(BASE)}


def finish_heads(
    plan: Plan,
    model: MedusaModel,
    weights: dict[str, Tensor] | None,
    data: PreparedData,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt: dict[str, str | None],
) -> MedusaReport | None:
    """Measure the heads, choose their tree, and write `output_dir/medusa` and the report; for the main process.

    prompt: {prompt_template, system_prompt} of training. weights: the gathered weights of a sharded model, which is not
    measured: its tree is a chain, until `ligertune medusa --report` measures the heads.
    """
    spec = plan.build.section(MedusaSpec)
    examples, measured_on = held_out(data)
    accuracy = None
    if examples is not None and plan.strategy != "fsdp":
        accuracy = head_accuracy(model, examples)
    paths = chain(spec.num_heads) if accuracy is None else best_paths(accuracy, spec.tree_nodes)
    base = plan.output_dir.resolve() / "model" if spec.stage == 2 else plan.build.model.model_name_or_path
    if weights is None:
        weights = model.state_dict()
    head = lm_head_of(model.base_model)
    name = next(name for name, module in base_of(model.base_model).named_modules() if module is head)
    weight = weights[f"{BASE}{name}.weight"]  # `head` itself may be sharded
    write_heads(
        {
            name.removeprefix(model.heads_prefix): t
            for name, t in weights.items()
            if name.startswith(model.heads_prefix)
        },
        weight,
        plan.output_dir / "medusa",
        ServedModel(str(base), tokenizer, prompt, plan.base),
        paths=paths,
        expand=spec.expand_lm_head,
    )
    if examples is None or accuracy is None:
        return None
    report = measure_heads(model, examples, measured_on, accuracy)
    write_report(report, plan.output_dir)
    return report


def save_heads(trained: TrainedModel) -> tuple[str, dict[str, Any] | None]:
    """Write `output_dir/medusa`, and `output_dir/model` if the model was trained with its heads (stage 2).

    Return the folder, and on the main rank the report on the heads.
    """
    plan = trained.plan
    model = trained.model
    assert isinstance(model, MedusaModel)  # of `with_heads`
    weights = trained.weights
    if plan.build.method.type == "lora" and (weights is None or trained.is_main):
        weights = merge_adapter(plan, trained.config, model, weights)
    if plan.build.section(MedusaSpec).stage == 2:
        trained.write(base_of(model.base_model), None if weights is None else of_base(weights))
    report = None
    if trained.is_main:
        with trained.autocast():
            report = finish_heads(
                plan, model, weights, trained.data, tokenizer=trained.tokenizer, prompt=trained.prompt
            )
    return str(plan.output_dir / "medusa"), None if report is None else report.as_dict()


def held_out(data: PreparedData) -> tuple[Examples | None, str]:
    """Return (examples to measure heads on, their description); training examples if none are held out."""
    if data.eval:
        examples = data.eval
        words = "held-out examples"
    elif data.streamed:
        return None, "nothing: streamed data holds nothing out"
    else:
        examples = examples_in_memory(data.train)
        words = "training examples (data.val_split: 0 holds none out)"
    chosen = examples.select(range(min(MAX_EXAMPLES, len(examples))))
    return chosen, f"{len(chosen)} {words}"


def report_on(options: RunOptions) -> MedusaReport:
    """Measure the heads in `output_dir` on the recipe's held-out data; rewrite their tree and the report."""
    folder = Path(options.checkpoint.output_dir) / "medusa"
    machine = this_machine()
    check_trained_folder(HEADS_FOLDER, str(folder), key="checkpoint.output_dir")
    check_run_files(folder.parent)
    hide_loading_bars()
    build = options.build
    trained = base_of_heads(folder, config := HeadsConfig.read(folder))
    spec = build.model.model_copy(update={"model_name_or_path": base_model_of(folder, config)})
    dtype = getattr(torch, trained.dtype if trained else choose_precision(spec.dtype, machine).weights)
    data = prepare(options.data_options, load_tokenizer(build.model).tokenizer, seed=build.seed)
    base = build_model(spec, read_config(spec), dtype=dtype, device=machine.device, seed=build.seed)
    heads = read_heads(folder, check_plain_head(base, hint=NEEDS_PLAIN_HEAD).weight)
    transform = logit_transform(base, hint=NEEDS_PLAIN_HEAD)
    model = MedusaModel(base, heads, build.section(MedusaSpec), transform=transform, fused=True)
    examples, measured_on = held_out(data)
    if examples is None:
        raise UserError(
            "data.streaming: streamed data holds nothing out to measure heads on.", hint="Give data.eval_datasets."
        )
    accuracy = head_accuracy(model, examples)
    report = measure_heads(model, examples, measured_on, accuracy)
    write_choices(folder, best_paths(accuracy, build.section(MedusaSpec).tree_nodes))
    write_report(report, folder.parent)
    return report
