"""What a run of task: medusa does beside any other: heads on the model, heads on the disk, and a report on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.errors import UserError
from ligertune.storage import write_json

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.data.examples import Examples
    from ligertune.data.prepare import PreparedData
    from ligertune.decode.medusa_report import MedusaReport
    from ligertune.planning.options import BuildOptions, RunOptions
    from ligertune.planning.plan import Plan
    from ligertune.tasks.medusa.candidate_tree import Path as TreePath
    from ligertune.tasks.medusa.medusa_model import MedusaModel

EXAMPLES = 256  # held-out ones that accuracy is measured on, at most
REPORT, PICTURE = "medusa_report.json", "medusa_report.png"


def with_heads(options: BuildOptions, model: PreTrainedModel, *, packed: bool) -> MedusaModel:
    """The model with its Medusa heads, whose backbone is called without the model around it."""
    from ligertune.attention.packed_mask_skip import know_rows
    from ligertune.tasks.medusa.attach import attach_heads
    from ligertune.tasks.medusa.head_form import backbone_of

    know_rows(backbone_of(model), packed=packed)
    return attach_heads(model, options.medusa, fused=options.kernels.fuses_heads_loss)


def save_heads(
    plan: Plan,
    accelerator: Accelerator,
    model: MedusaModel,
    weights: dict | None,
    paths: list[TreePath],
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt_template: str,
) -> str:
    """Write `output_dir/medusa`, on the main process. weights: all of `model`'s, where its own are sharded."""
    import torch

    from ligertune.tasks.medusa.head_form import adapted_model
    from ligertune.tasks.medusa.heads_files import HeadsConfig, fingerprint_of, write_heads

    spec, folder = plan.build.medusa, plan.output_dir / "medusa"
    base = plan.output_dir.resolve() / "model" if spec.stage == 2 else plan.build.model.model_name_or_path
    inner = accelerator.unwrap_model(model)
    if weights is None:
        weights = inner.state_dict()
    head = inner.get_output_embeddings()
    name = next(name for name, module in adapted_model(inner.base_model).named_modules() if module is head)
    weight = weights[f"base_model.{name}.weight"]
    dtype = str(weight.dtype).removeprefix("torch.")
    config = HeadsConfig(
        medusa_num_heads=spec.num_heads,
        medusa_num_layers=spec.num_layers,
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        base_model_name_or_path=str(base),
        original_lm_head=spec.lm_head == "shared",
        torch_dtype=dtype,
        base_model_fingerprint=fingerprint_of(weight.to(getattr(torch, dtype))),
    )
    prefix = "medusa_head."
    write_heads(
        {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)},
        config,
        weight,
        folder,
        tokenizer=tokenizer,
        paths=paths,
        expand=spec.expand_lm_head,
        prompt_template=prompt_template,
        system_prompt=plan.data_options.system_prompt,
    )
    return str(folder)


def of_base(weights: dict | None) -> dict | None:
    """The weights of the model in those of the model with heads."""
    prefix = "base_model."
    return weights and {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}


def merge_adapter(
    options: BuildOptions, config: PreTrainedConfig, accelerator: Accelerator, model: nn.Module, weights: dict | None
) -> dict | None:
    """Put the adapter into the model beside the heads, which are served with one model. weights: as they are then.

    Where the model is sharded (`weights`: all of its own), that happens to a copy on the main process.
    """
    from ligertune.models.load import whole_model
    from ligertune.models.trainable import apply_method

    inner = accelerator.unwrap_model(model)
    if weights is None:
        inner.base_model = inner.base_model.merge_and_unload()
        return None
    if not accelerator.is_main_process:
        return weights
    adapted = apply_method(whole_model(options.model, config), options.method)
    adapted.load_state_dict(of_base(weights))
    base = {f"base_model.{name}": t for name, t in adapted.merge_and_unload().state_dict().items()}
    return base | {name: t for name, t in weights.items() if not name.startswith("base_model.")}


def held_out(data: PreparedData) -> tuple[Examples | None, str]:
    """What heads are measured on: examples they were not trained on, if the recipe holds any out."""
    if data.eval:
        examples, words = data.eval, "held-out examples"
    elif data.streamed:
        return None, "nothing: streamed data holds nothing out"
    else:
        examples, words = data.train, "training examples (data.val_split: 0 holds none out)"
    chosen = examples.select(range(min(EXAMPLES, len(examples))))
    return chosen, f"{len(chosen)} {words}"


def accuracy_of(model: MedusaModel, examples: Examples) -> list[list[float]]:
    """accuracy[k][r] of head k + 1, rank r, one example at a time."""
    import numpy as np

    from ligertune.data.batching.collate import Batcher
    from ligertune.models.compile import run_eagerly
    from ligertune.tasks.medusa.head_accuracy import rank_accuracy

    batcher = Batcher(
        examples,
        packed=False,
        multiple_of=1,
        pad_token_id=0,
        index_labels=False,
        device=model.get_output_embeddings().weight.device,
    )
    batches = (batcher([np.array([i])]) for i in range(len(examples)))
    with run_eagerly():
        return rank_accuracy(model, batches).nan_to_num(0.0).tolist()


def measure_heads(
    model: MedusaModel, examples: Examples, measured_on: str, accuracy: list[list[float]]
) -> MedusaReport:
    """The report on trained heads; `model` is left with attention that takes any mask."""
    from ligertune.decode.medusa_report import MedusaReport, measure_decoding, prompt_of
    from ligertune.models.compile import run_eagerly
    from ligertune.tasks.medusa.candidate_tree import Tree, best_paths

    spec, base = model.spec, model.base_model
    tree = Tree.of(best_paths(accuracy, spec.tree_nodes), device=model.get_output_embeddings().weight.device)
    decoding = None
    if spec.eval_prompts:
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
        chosen = (examples[i] for i in range(min(spec.eval_prompts, len(examples))))
        prompts = [prompt_of(example.input_ids, example.labels) for example in chosen]
        with run_eagerly():
            decoding = measure_decoding(
                base, model.medusa_head, model.form, prompts, tree, max_new_tokens=spec.eval_new_tokens
            )
    return MedusaReport(
        measured_on=measured_on,
        top1=[row[0] for row in accuracy],
        top5=[sum(row[:5]) for row in accuracy],
        tree_nodes=len(tree),
        tree_depth=tree.depth,
        decoding=decoding,
    )


def write_report(report: MedusaReport, output_dir: Path) -> None:
    """medusa_report.json, and medusa_report.png where matplotlib is."""
    from ligertune.decode.medusa_plot import plot, plots_are_possible

    write_json(output_dir / REPORT, report.as_dict())
    if plots_are_possible():
        plot(report, output_dir / PICTURE)


def finish_heads(
    plan: Plan,
    accelerator: Accelerator,
    model: nn.Module,
    weights: dict | None,
    data: PreparedData,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt_template: str,
) -> tuple[str, MedusaReport | None]:
    """On the main process: accuracy, the tree it gives, the heads on disk, and the report. (folder, report).

    A sharded model is not decoded: its heads are written with the chain, and `ligertune medusa --report` measures them.
    """
    from ligertune.tasks.medusa.candidate_tree import best_paths, chain

    spec, (examples, measured_on) = plan.build.medusa, held_out(data)
    inner = accelerator.unwrap_model(model)
    accuracy = None
    if plan.strategy != "fsdp" and examples is not None:
        with accelerator.autocast():
            accuracy = accuracy_of(inner, examples)
    paths = chain(spec.num_heads) if accuracy is None else best_paths(accuracy, spec.tree_nodes)
    folder = save_heads(plan, accelerator, inner, weights, paths, tokenizer=tokenizer, prompt_template=prompt_template)
    if accuracy is None:
        return folder, None
    with accelerator.autocast():
        report = measure_heads(inner, examples, measured_on, accuracy)
    write_report(report, plan.output_dir)
    return folder, report


def report_on(options: RunOptions) -> MedusaReport:
    """Measure the heads that `output_dir` holds on the recipe's held-out data, anew; their tree is rewritten, too."""
    import torch

    from ligertune.data.prepare import prepare
    from ligertune.hardware import this_machine
    from ligertune.models import load
    from ligertune.planning.precision import choose_precision
    from ligertune.planning.preflight import check_heads_path
    from ligertune.tasks.medusa.candidate_tree import best_paths
    from ligertune.tasks.medusa.head_form import check_plain_head, head_form
    from ligertune.tasks.medusa.heads_files import HeadsConfig, base_model_of, read_heads, write_choices
    from ligertune.tasks.medusa.medusa_model import MedusaModel

    folder, machine = Path(options.checkpoint.output_dir) / "medusa", this_machine()
    check_heads_path(str(folder), key="checkpoint.output_dir")
    load.hide_loading_bars()
    build = options.build
    spec = dataclasses.replace(build.model, model_name_or_path=base_model_of(folder, HeadsConfig.read(folder)))
    dtype = getattr(torch, choose_precision(spec.dtype, machine).weights)
    loaded = load.load_tokenizer(build.model)
    data = prepare(options.data, loaded.tokenizer, seed=build.seed)
    base = load.build_model(spec, load.read_config(spec), dtype=dtype, device=machine.device, seed=build.seed)
    heads = read_heads(folder, check_plain_head(base).weight)
    model = MedusaModel(base, heads, build.medusa, form=head_form(base), fused=True)
    examples, measured_on = held_out(data)
    if examples is None:
        raise UserError("data.streaming: streamed data holds nothing out to measure heads on.",
                        hint="Give data.eval_datasets.")  # fmt: skip
    accuracy = accuracy_of(model, examples)
    report = measure_heads(model, examples, measured_on, accuracy)
    write_choices(folder, best_paths(accuracy, build.medusa.tree_nodes))
    write_report(report, folder.parent)
    return report
