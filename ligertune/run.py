"""The story of a run: recipe -> job (plan, tokenizer, data) -> model -> patched model -> loop -> report."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.decode.medusa_run import finish_heads, merge_adapter, of_base, with_heads
from ligertune.hardware import Machine, available_memory, imagined_machine, is_launched, ranks_on_node, this_machine
from ligertune.planning.batch_layout import (
    length_multiple,
    padding_free_notes,
    resolve_packing,
    row_kind,
    without_padding_free,
)
from ligertune.planning.cuda_graph_checks import check_cuda_graphs, cuda_graphs_notes, suggest_cuda_graphs
from ligertune.planning.memory.pinned_memory import warn_of_host_memory
from ligertune.planning.options import BatchLayoutOptions, RunOptions
from ligertune.planning.plan import BuiltModel, Plan, make_plan
from ligertune.planning.precision import check_float8, choose_precision
from ligertune.planning.preflight import check_output_dir, check_packages, check_paths, clear_run
from ligertune.plots import draw_curves
from ligertune.progress import Phases, importing
from ligertune.recipe import Recipe, dump_recipe
from ligertune.report import Report, throughput, versions
from ligertune.storage import read_metrics, write_json
from ligertune.train.model_builder import apply_kernels, preview_model

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel

    from ligertune.data.prepare import PreparedData, ProgressCallback
    from ligertune.models.load import LoadedTokenizer
    from ligertune.tasks.medusa.medusa_model import MedusaModel
    from ligertune.train.loop import TrainResult
    from ligertune.train.signals import StopRequest
    from ligertune.vision.reader import ImageReader


@dataclass(frozen=True)
class Job:
    """A plan and what was loaded to make it."""

    recipe: Recipe
    plan: Plan
    config: PreTrainedConfig
    tokenizer: LoadedTokenizer
    data: PreparedData
    images: ImageReader | None = None  # of a model that sees


# What `plan_for` and `run` import beyond this file, so far as it does not depend on the recipe.
IMPORTED = ("ligertune.data.prepare", "ligertune.models.load", "ligertune.patching.patch", "ligertune.train.loop")


def prepare_to_train() -> None:
    """Import it: for a process that has nothing else to do until it is told the plan."""
    with importing():
        for module in IMPORTED:
            importlib.import_module(module)


def plan_for(
    recipe: Recipe,
    progress: ProgressCallback | None = None,
    *,
    for_show: bool = False,
    memory_gib: float | None = None,
    gpus: int | None = None,
    processes: int | None = None,
) -> Job:
    """Load what is light (configuration, tokenizer, data), build the model without memory, and resolve every number.

    What can be refused is refused in the order of its cost: a missing file before torch is imported. `progress` is told
    how far the preparing of data is. for_show: nothing will be written, so output_dir may hold a run; and the device
    may be another: of memory_gib GiB, or several (gpus) that share the states. processes: how many train together, if
    not those of a launcher.
    """
    if not for_show:
        check_output_dir(recipe)
    check_paths(recipe)
    machine = this_machine() if not for_show else imagined_machine(memory_gib=memory_gib, gpus=gpus)
    if processes is not None:
        machine = dataclasses.replace(machine, world_size=processes)
    check_packages(recipe)
    check_float8(recipe, machine)
    precision = choose_precision(recipe.model.dtype, machine, method=recipe.method.type)

    with importing():
        from ligertune.attention.padding_free import choose_rows
        from ligertune.data.batching.plan_inputs import rows_of, summarise
        from ligertune.data.prepare import prepare
        from ligertune.models import load
        from ligertune.train.checkpoint.checkpoint_files import check_unfinished
        from ligertune.train.distributed import launched_with_fsdp
        from ligertune.vision.families import exact_packing
        from ligertune.vision.reader import load_reader

    options = RunOptions.of(recipe)
    config = load.read_config(options.build.model)
    recipe, packing_notes = resolve_packing(recipe, **exact_packing(config))
    options, layout = RunOptions.of(recipe), BatchLayoutOptions.of(recipe)
    choose_rows(layout, config, machine, precision)  # what cannot be is refused before the data are read
    loaded = load.load_tokenizer(options.build.model)
    load.check_vocabulary(loaded.tokenizer, config)
    images = load_reader(options.build.model, options.build.vision, config, loaded.tokenizer)
    data = prepare(options.data, loaded.tokenizer, seed=options.build.seed, progress=progress, images=images)
    lengths = None if data.streamed else data.train.lengths
    attention, padding_free = choose_rows(layout, config, machine, precision, lengths=lengths)
    shape, attn, backend, kernels = preview_model(options.build, config, machine.device, attention)
    plan = make_plan(
        recipe,
        machine,
        model=BuiltModel(shape, attn, attention.why, backend, kernels),
        data=summarise(data, images),
        rows=rows_of(
            row_kind(recipe),
            data,
            max_length=recipe.data.max_length,
            multiple_of=length_multiple(recipe, attention.multiple_of * recipe.parallel.cp_size),
            padding_free=padding_free,
        ),
        launched_with_fsdp=launched_with_fsdp() or (for_show and gpus is not None),
        notes=(*recipe.notices, *loaded.notes, *packing_notes, *unasked(recipe, machine)),
    )
    check_cuda_graphs(plan, has_images=images is not None)
    plan = suggest_cuda_graphs(plan, recipe, has_images=images is not None)
    if not for_show:
        check_unfinished(plan)
        plan = warn_of_this_host(plan)
    return Job(recipe, plan, config, loaded, data, images)


def warn_of_this_host(plan: Plan) -> Plan:
    """The plan, with a note if this host's memory is short."""
    processes = ranks_on_node() if is_launched() else plan.machine.world_size
    return warn_of_host_memory(plan, processes=processes, free=available_memory())


def unasked(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    """Where a key is not what it is asked for."""
    return (*padding_free_notes(recipe), *cuda_graphs_notes(recipe, machine))


def run(
    job: Job,
    show: Callable[[dict], None],
    *,
    change: Callable[[PreTrainedModel], None] | None = None,
    phases: Phases | None = None,
) -> Report:
    """Train as planned, save the model, and report. `show` receives each logged line.

    change: what a comparison does to the model besides: another library's kernels, compiled layers.
    """
    from ligertune.train.signals import StopRequest

    with StopRequest(enabled=job.plan.checkpoint.save_on_signal) as stop:
        return train_and_save(job, show, stop, change, phases or Phases())


def train_and_save(
    job: Job, show: Callable, stop: StopRequest, change: Callable[[PreTrainedModel], None] | None, phases: Phases
) -> Report:
    """What `run` does while signals are `stop`'s to answer."""
    with importing():
        from ligertune.attention.sdpa import prefer_flash
        from ligertune.models.load import hide_loading_bars
        from ligertune.train.checkpoint.trained_weights import save_only_what_trains
        from ligertune.train.checks import explain_out_of_memory
        from ligertune.train.distributed import start_accelerator
        from ligertune.train.loop import fit
        from ligertune.train.setup import set_up_training

    plan, began = job.plan, time.perf_counter()
    phases.begin("loading the model")
    hide_loading_bars()
    prefer_flash()
    accelerator = start_accelerator(plan)
    if accelerator.is_main_process:
        begin_output(job)
    accelerator.wait_for_everyone()
    model, job = trained_model(job, accelerator, change)
    if job.plan is not plan and accelerator.is_main_process:
        write_json(plan.output_dir / "plan.json", job.plan.as_dict())
    plan = job.plan
    save_only_what_trains(accelerator, model)
    with explain_out_of_memory(plan):
        phases.begin("preparing to train")
        training = set_up_training(
            plan,
            accelerator,
            model,
            job.data,
            pad_token_id=job.tokenizer.pad_token_id,
            show=show,
            images=job.images,
            answer=answers(job),
        )
        fitted = fit(training, stop=stop, phases=phases)
    save = save_with_heads if plan.build.task == "medusa" else save_model
    keep = plan.checkpoint.save_model and not fitted.stopped_by
    model_path, medusa = save(job, accelerator, fitted) if keep else (None, None)
    report = make_report(job, fitted, model_path=model_path, seconds=time.perf_counter() - began, medusa=medusa)
    report = dataclasses.replace(report, seconds_to_first_step=phases.seconds)
    if accelerator.is_main_process:
        draw_curves(plan.output_dir)
        write_json(plan.output_dir / "report.json", report.as_dict())
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return report


def trained_model(
    job: Job, accelerator: Accelerator, change: Callable[[PreTrainedModel], None] | None
) -> tuple[PreTrainedModel | PeftModel | MedusaModel, Job]:
    """What the loop trains: the model with our kernels, and with adapters or heads where the recipe says so.

    And the job, which pads after all where rows were to be joined unasked and the model cannot keep examples apart.
    """
    import torch

    from ligertune.activations.checkpointing import checkpoint_layers
    from ligertune.attention.packed_mask_skip import know_rows
    from ligertune.models.compile import compile_layers
    from ligertune.models.float8 import to_float8
    from ligertune.models.load import build_model
    from ligertune.models.trainable import apply_method
    from ligertune.train.checks import why_not_padding_free
    from ligertune.vision.freeze import prepare_vision

    plan = job.plan
    model = build_model(
        dataclasses.replace(plan.build.model, attn_implementation=plan.attn_implementation),
        job.config,
        dtype=getattr(torch, plan.precision.weights),
        device=accelerator.device,
        seed=plan.build.seed,
        four_bits=plan.build.method.type == "qlora",
    )
    apply_kernels(plan.build, model)
    prepare_vision(model, plan.build.vision)
    if change is not None:
        change(model)
    know_rows(model, packed=plan.rows.is_padding_free)
    if plan.rows.is_padding_free:
        with accelerator.autocast():
            why = why_not_padding_free(plan, model)
        if why is not None:
            del model
            return trained_model(padded(job, why), accelerator, change)
    if plan.build.execution.torch_compile:  # behind that check, whose rows are shorter: a graph of their own
        compile_layers(model)
    if (
        plan.build.execution.fp8
    ):  # behind that check: documents of a batch share one scale, and so each other's rounding
        to_float8(model)
    if kept := plan.build.execution.gradient_checkpointing:
        checkpoint_layers(model, kept, compiled=plan.build.execution.torch_compile, first=plan.checkpointed_layers)
    model = apply_method(model, plan.build.method, seed=plan.build.seed, fused=plan.build.kernels.fuses_lora)
    if plan.build.task == "medusa":
        with accelerator.autocast():  # the model is asked what it does with its head, and adapters are float32
            model = with_heads(plan.build, model, packed=plan.rows.is_padding_free)
    return model, job


def padded(job: Job, why: str) -> Job:
    """The job with padded batches after all, and a note that says why."""
    from ligertune.attention.padding_free import choose_rows
    from ligertune.models.load import read_config

    plan = job.plan
    recipe, config = (
        without_padding_free(job.recipe),
        read_config(plan.build.model),
    )  # building a model changes its config
    attention, _ = choose_rows(BatchLayoutOptions.of(recipe), config, plan.machine, plan.precision)
    _, attn, *_ = preview_model(plan.build, config, plan.machine.device, attention)
    rows = dataclasses.replace(plan.rows, padding_free=False, multiple_of=attention.multiple_of)
    notes = (*plan.notes, f"batches are padded: {why}")
    plan = dataclasses.replace(plan, attn_implementation=attn, attn_why=attention.why, rows=rows, notes=notes)
    return dataclasses.replace(job, plan=plan, config=config)


def begin_output(job: Job) -> None:
    """Rehearse the first save, and write down what is about to be done."""
    from ligertune.train.checkpoint.checkpoint_files import check_space

    plan = job.plan
    if plan.checkpoint.overwrite:
        clear_run(plan.output_dir)
    check_space(plan)
    write_json(plan.output_dir / "plan.json", plan.as_dict())
    (plan.output_dir / "resolved_recipe.yaml").write_text(dump_recipe(job.recipe), encoding="utf-8")


def prompt_of(job: Job) -> dict:
    """How prompts look in this run: kept beside the model, and used for its samples."""
    template = {"alpaca": "alpaca", "plain": "raw"}.get(job.data.template, "chat")
    return {"prompt_template": template, "system_prompt": job.plan.data_options.system_prompt}


def answers(job: Job) -> Callable[[PreTrainedModel], list[dict[str, str]]] | None:
    """What answers the recipe's prompts; None without any, or where each rank holds a part of the model."""
    prompts = job.plan.evaluation.sample_prompts
    if not prompts or job.plan.shares_weights:
        return None
    from ligertune.decode.samples import answers_to

    return answers_to(prompts, job.tokenizer.tokenizer, prompt_of(job), pad_token_id=job.tokenizer.pad_token_id)


def save_with_heads(job: Job, accelerator: Accelerator, fitted: TrainResult) -> tuple[str, dict | None]:
    """Write `output_dir/medusa`, beside `output_dir/model` where that was trained too; (the heads' folder, report)."""
    from ligertune.tasks.medusa.head_form import adapted_model
    from ligertune.train.distributed import full_state_dict

    plan, model, report = job.plan, fitted.model, None
    weights = full_state_dict(accelerator, model)
    if plan.build.method.type == "lora":
        weights = merge_adapter(plan.build, job.config, accelerator, model, weights)
    if plan.build.medusa.stage == 2:
        base = adapted_model(accelerator.unwrap_model(model).base_model)
        write_base_model(job, accelerator, base, of_base(weights))
    if accelerator.is_main_process:
        _, report = finish_heads(
            plan,
            accelerator,
            model,
            weights,
            job.data,
            tokenizer=job.tokenizer.tokenizer,
            prompt_template=prompt_of(job)["prompt_template"],
        )
    accelerator.wait_for_everyone()
    return str(plan.output_dir / "medusa"), None if report is None else report.as_dict()


def save_model(job: Job, accelerator: Accelerator, fitted: TrainResult) -> tuple[str, None]:
    """Write `output_dir/model` in Hugging Face's format; all ranks call it, the main one writes."""
    from ligertune.train.distributed import full_state_dict

    weights = full_state_dict(accelerator, fitted.model) if fitted.best_weights is None else fitted.best_weights
    return write_base_model(job, accelerator, accelerator.unwrap_model(fitted.model), weights), None


def write_base_model(job: Job, accelerator: Accelerator, model: Module, weights: dict | None) -> str:
    """The model, its tokenizer and what prompts looked like, on the main process."""
    from ligertune.models.save import write_model

    folder, wanted = job.plan.output_dir / "model", job.plan.data_options
    tokenizer = job.tokenizer.tokenizer
    if wanted.prompt_template not in ("auto", "chat", "alpaca"):  # a file: what serves the model must use it too
        tokenizer.chat_template = Path(wanted.prompt_template).read_text(encoding="utf-8")
    if accelerator.is_main_process:
        write_model(model, tokenizer, folder, state_dict=weights, **prompt_of(job), images=job.images)
    accelerator.wait_for_everyone()
    return str(folder)


def make_report(
    job: Job, fitted: TrainResult, *, model_path: str | None, seconds: float, medusa: dict | None = None
) -> Report:
    """Put together what the plan intended and what training came to."""
    plan, account = job.plan, job.data.train.stream.account() if job.data.streamed else ()
    losses = [line["loss"] for line in read_metrics(plan.output_dir / "metrics.jsonl") if "loss" in line]
    return Report(
        status="interrupted" if fitted.stopped_by else "completed",
        stopped_by=fitted.stopped_by,
        steps=fitted.step,
        total_steps=plan.schedule.total_steps,
        resumed_from=fitted.resumed_from,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        eval_loss=fitted.last_eval_loss,
        throughput=throughput(plan, fitted.work, fitted.seconds, warmup_excluded=fitted.warmup_excluded),
        peak_memory=fitted.peak_memory,
        kernels_backend=plan.kernels_backend,
        kernels=plan.kernels,
        model_family=plan.model_family,
        n_parameters=plan.n_parameters,
        n_trainable=plan.n_trainable,
        device=plan.machine.name,
        world_size=plan.batching.world_size,
        strategy=plan.strategy,
        dtype="float16" if plan.precision.autocast == "fp16" else plan.precision.weights,
        seconds=seconds,
        output_dir=str(plan.output_dir),
        model_path=model_path,
        versions=versions(),
        notes=(*plan.notes, *fitted.notes, *account),
        medusa=medusa,
    )
