"""A run on one page: recipe -> plan -> model -> patched model -> training loop -> report."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ligertune.attention.padding_free import choose_batch_layout
from ligertune.attention.sdpa import prefer_flash
from ligertune.data.modalities.modality import modality_of
from ligertune.data.prepare import ProgressCallback, prepare
from ligertune.data.statistics import epoch_rows, summarize_data
from ligertune.files.storage import mask_secrets, utc_now, write_json, write_text
from ligertune.hardware import (
    Machine,
    available_memory,
    is_launched,
    is_main_process,
    ranks_on_node,
    simulated_machine,
    simulation_notes,
    this_machine,
)
from ligertune.launcher.failures import is_started_rank
from ligertune.launcher.run_lock import locked_folder
from ligertune.launcher.signals import StopRequest
from ligertune.models.added_tokens import trained_tokens
from ligertune.models.load import hide_loading_bars
from ligertune.models.load_tokenizer import check_vocabulary, load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.score_head import check_task
from ligertune.planning.batch_layout import resolve_packing
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.hub import hub_notes
from ligertune.planning.make_plan import PlanInputs, check_host_memory, make_plan, warn_of_host_memory
from ligertune.planning.options import BatchLayoutOptions, RunOptions, with_fused_lora
from ligertune.planning.plan import Plan
from ligertune.planning.precision import check_float8, choose_precision
from ligertune.planning.preflight import check_output_dir, check_packages, check_sources, clear_run
from ligertune.plots import draw_curves
from ligertune.progress import Display, Phases
from ligertune.recipe import Recipe
from ligertune.recipe.feature import part_of_task
from ligertune.recipe.plain_yaml import dump
from ligertune.report import Report, loss_unit, make_report, model_title, write_page
from ligertune.train.checkpoint.checkpoint_files import check_space
from ligertune.train.checkpoint.final_model import save_final_model
from ligertune.train.checkpoint.load_checkpoint import check_unfinished
from ligertune.train.checks import explain_out_of_memory
from ligertune.train.distributed import launched_with_fsdp, start_accelerator
from ligertune.train.loop import fit
from ligertune.train.metrics_logger import open_trackers
from ligertune.train.model_builder import Change, preview_model, trained_model
from ligertune.train.setup import Job, Training


def plan_for(
    recipe: Recipe,
    progress: ProgressCallback | None = None,
    *,
    for_show: bool = False,
    memory_gib: float | None = None,
    gpus: int | None = None,
    processes: int | None = None,
) -> Job:
    """Check a recipe, load its configuration, tokenizer and data, and resolve every number of the run.

    Checks run in the order of their cost. Raises UserError. progress: called while data are prepared. for_show: nothing
    will be written, so output_dir may hold a run, and the device may be a simulated one of `memory_gib` GiB, or `gpus`
    of them that share the model states. processes: number of ranks, if no launcher sets it.
    """
    if not for_show:
        check_output_dir(recipe.checkpoint)
    check_sources(recipe)
    machine = this_machine() if not for_show else simulated_machine(memory_gib=memory_gib, gpus=gpus)
    machine = machine if processes is None else replace(machine, world_size=processes)
    check_packages(recipe)
    check_float8(recipe, machine)
    job = _load_and_plan(
        recipe, machine, progress, sharded=for_show and gpus is not None and recipe.method.stored_as is None
    )
    if for_show:
        return job
    plan = replace(job.plan, notes=(*job.plan.notes, *check_unfinished(job.plan)))
    on_this_host = ranks_on_node() if is_launched() else machine.world_size
    return replace(job, plan=warn_of_host_memory(plan, processes=on_this_host, free=available_memory()))


def _load_and_plan(recipe: Recipe, machine: Machine, progress: ProgressCallback | None, *, sharded: bool) -> Job:
    """Load everything but the weights, and make the plan. sharded: plan for FSDP, whatever fits."""
    config = read_config(recipe.model)
    check_task(config, recipe.task)
    modality = modality_of(config)
    recipe, packing_notes = resolve_packing(recipe, modality.facts)
    recipe = with_fused_lora(recipe, machine)
    layout = BatchLayoutOptions.of(recipe)
    precision = choose_precision(recipe.model.dtype, machine, method=recipe.method.type)
    choose_batch_layout(layout, config, machine, precision)  # refuse impossible settings before data are read
    tokenizer = load_tokenizer(recipe.model)
    check_vocabulary(tokenizer.tokenizer, config)
    tokens = {"trainable_token_indices": trained_tokens(tokenizer.tokenizer, recipe.method)}
    recipe = recipe.model_copy(update={"method": recipe.method.model_copy(update=tokens)})
    options = RunOptions.of(recipe)
    feature = feature_of(recipe.task)
    part = part_of_task(recipe.task)
    teacher = feature.frozen_model(options, config, tokenizer.tokenizer, machine, precision)
    reader = modality.load_reader(recipe.model, options.build, tokenizer.tokenizer)
    data = prepare(
        recipe.data,
        tokenizer.tokenizer,
        seed=recipe.train.seed,
        progress=progress,
        reader=reader,
        rows=part.rows(recipe),
        label_options=part.labels(recipe),
    )
    data.check_dropped()
    recipe = recipe.model_copy(update=dict(feature.resolve(recipe, data)))
    options = RunOptions.of(recipe)
    file_notes = feature.check_data(options.build, data, config.get_text_config().vocab_size)
    lengths = None if data.streamed else data.train.lengths
    attention, padding_free = choose_batch_layout(layout, config, machine, precision, lengths=lengths)
    teacher = feature.frozen_attention(teacher, options, machine, precision, packed=layout.packing or padding_free)
    model = preview_model(options.build, config, attention, device=machine.device)
    frozen = teacher.shape if teacher else feature.frozen_copy(options.build, model.shape, precision)
    multiple_of = max(attention.multiple_of, teacher.multiple_of if teacher else 1)
    inputs = PlanInputs(
        machine=machine,
        precision=precision,
        model=replace(model, frozen_model=frozen),
        data=summarize_data(data, reader),
        rows=epoch_rows(layout, data, multiple_of=multiple_of, padding_free=padding_free),
        why_fsdp="as the launcher configured" if launched_with_fsdp() else "as --gpus assumes" if sharded else "",
        modality=modality.facts,
        teacher=teacher,
    )
    notes = (*recipe.notices, *simulation_notes(machine), *tokenizer.notes, *packing_notes, *data.notes, *file_notes)
    notes += hub_notes()
    plan = make_plan(recipe, inputs, notes=notes)
    return Job(plan, config, tokenizer, data, reader)


def run(
    job: Job,
    show: Callable[[dict], None],
    *,
    change: Change | None = None,
    phases: Phases | None = None,
    display: Display | None = None,
) -> Report:
    """Train as planned, save the model, and report. All ranks call it.

    show: receives each logged line. change: applied to the patched model, for comparisons with other kernels. phases:
    measures the time to the first step. display: shows steps and evaluations while they run.
    """
    display = display or Display()
    check_host_memory(job.plan)
    stop = StopRequest(job.plan.output_dir, enabled=job.plan.checkpoint.save_on_signal)
    with output_dir_of(job.plan), stop:
        started = utc_now()
        began = time.perf_counter()
        phases = phases or Phases()
        phases.begin("loading the model")
        gc.freeze()  # the garbage collection after the first step searches what this run makes, not imported modules
        hide_loading_bars()
        prefer_flash()
        accelerator = start_accelerator(job.plan)
        open_trackers(job.plan, accelerator)
        if accelerator.is_main_process:
            begin_output(job.plan)
        accelerator.wait_for_everyone()
        model, plan = trained_model(job.plan, job.config, accelerator, change=change)
        if plan is not job.plan and accelerator.is_main_process:
            write_json(plan.output_dir / "plan.json", plan.as_dict())
        job = replace(job, plan=plan)
        with explain_out_of_memory(plan):
            phases.begin("preparing to train")
            fitted = fit(Training(job, accelerator, model, show=show, display=display), stop=stop, phases=phases)
        display.begins("writing the model")
        saves = plan.checkpoint.save_model and not fitted.stopped_by
        model_path, measured = save_final_model(job, accelerator, fitted) if saves else (None, None)
        report = make_report(
            plan,
            fitted,
            model_path=model_path,
            measured=measured,
            started=started,
            seconds=time.perf_counter() - began,
            seconds_to_first_step=phases.seconds,
            notes=job.data.train.stream.account() if job.data.streamed else (),
        )
        if accelerator.is_main_process:
            draw_curves(plan.output_dir, title=model_title(plan.settings), loss_unit=loss_unit(plan.settings))
            write_page(plan, report)
            write_json(plan.output_dir / "report.json", report.as_dict())  # last: with it the run is finished
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return report


@contextlib.contextmanager
def output_dir_of(plan: Plan, *, processes: Sequence[int] = ()) -> Iterator[None]:
    """Hold the lock of output_dir for one run, in the process that the user started or in the main rank.

    processes: the ranks that the launcher started. Another run may have used the folder while this one was planned, so
    the checks of plan_for are repeated. Raises UserError.
    """
    if is_started_rank() or not is_main_process():
        yield
        return
    with locked_folder(plan.output_dir, processes=processes):
        check_output_dir(plan.checkpoint)
        check_unfinished(plan)
        yield


def begin_output(plan: Plan) -> None:
    """Check permissions and disk space, and write plan.json and resolved_recipe.yaml. Only the main rank calls it."""
    if plan.checkpoint.overwrite:
        clear_run(plan.output_dir)
    check_space(plan)
    write_json(plan.output_dir / "plan.json", plan.as_dict())
    write_text(plan.output_dir / "resolved_recipe.yaml", mask_secrets(dump(plan.settings)))
