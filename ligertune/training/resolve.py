"""Resolve a recipe: check it, load its configuration, tokenizer and data, and decide every number of the run."""

from __future__ import annotations

from dataclasses import replace

from ligertune.attention.padding_free import choose_batch_layout
from ligertune.data.modalities.modality import ModalityReader, modality_of
from ligertune.data.prepare import PreparedData, ProgressCallback, prepare
from ligertune.data.statistics import epoch_rows, summarize_data
from ligertune.hardware import (
    Machine,
    available_memory,
    is_launched,
    ranks_on_node,
    simulated_machine,
    simulation_notes,
    this_machine,
)
from ligertune.models.added_tokens import trained_tokens
from ligertune.models.load_tokenizer import LoadedTokenizer, check_vocabulary, load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.score_head import check_task
from ligertune.planning.batch_layout import resolve_packing
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.hub import hub_notes
from ligertune.planning.make_plan import PlanInputs, make_plan, warn_of_host_memory
from ligertune.planning.options import BatchLayoutOptions, RunOptions, with_fused_lora
from ligertune.planning.precision import check_float8, choose_precision
from ligertune.planning.preflight import check_output_dir, check_packages, check_sources
from ligertune.recipe.feature import part_of_task
from ligertune.recipe.schema import Recipe
from ligertune.training.checkpoint.load_checkpoint import check_unfinished
from ligertune.training.model_builder import preview_model
from ligertune.training.parallel.distributed import launched_with_fsdp
from ligertune.training.setup import Job


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
    """Load everything but the weights, and make the plan. sharded: plan for FSDP, whatever fits.

    The recipe is completed in three steps, as its values become known: by model and machine, tokenizer, and data.
    """
    config = read_config(recipe.model)
    check_task(config, recipe.task)
    modality = modality_of(config)
    by_model, packing_notes = resolve_packing(with_fused_lora(recipe, machine), modality.facts)
    precision = choose_precision(recipe.model.dtype, machine, method=recipe.method.type)
    layout = BatchLayoutOptions.of(by_model)
    choose_batch_layout(layout, config, machine, precision)  # refuse impossible settings before data are read
    tokenizer = load_tokenizer(recipe.model)
    check_vocabulary(tokenizer.tokenizer, config)
    by_tokenizer = _with_token_ids(by_model, tokenizer)
    feature = feature_of(recipe.task)
    before_data = RunOptions.of(by_tokenizer)
    frozen = feature.frozen_model(before_data, config, tokenizer.tokenizer, machine, precision)
    reader = modality.load_reader(recipe.model, before_data.build, tokenizer.tokenizer)
    data = _prepare_data(by_tokenizer, tokenizer, reader, progress)
    resolved = by_tokenizer.model_copy(update=dict(feature.resolve(by_tokenizer, data)))
    options = RunOptions.of(resolved)
    data_notes = feature.check_data(options.build, data, config.get_text_config().vocab_size)
    lengths = None if data.streamed else data.train.lengths
    attention, padding_free = choose_batch_layout(layout, config, machine, precision, lengths=lengths)
    packed = layout.packing or padding_free
    teacher = feature.frozen_attention(frozen, options, machine, precision, packed=packed)
    model = preview_model(options.build, config, attention, device=machine.device)
    beside = teacher.shape if teacher else feature.frozen_copy(options.build, model.shape, precision)
    multiple_of = max(attention.multiple_of, teacher.multiple_of if teacher else 1)
    inputs = PlanInputs(
        machine=machine,
        precision=precision,
        model=replace(model, frozen_model=beside),
        data=summarize_data(data, reader),
        rows=epoch_rows(layout, data, multiple_of=multiple_of, padding_free=padding_free),
        why_fsdp="as the launcher configured" if launched_with_fsdp() else "as --gpus assumes" if sharded else "",
        modality=modality.facts,
        teacher=teacher,
    )
    notes = (*recipe.notices, *simulation_notes(machine), *tokenizer.notes, *packing_notes, *data.notes, *data_notes)
    return Job(make_plan(resolved, inputs, notes=(*notes, *hub_notes())), config, tokenizer, data, reader)


def _with_token_ids(recipe: Recipe, tokenizer: LoadedTokenizer) -> Recipe:
    """Return the recipe with ids for the texts of `method.trainable_token_indices`."""
    ids = trained_tokens(tokenizer.tokenizer, recipe.method)
    method = recipe.method.model_copy(update={"trainable_token_indices": ids})
    return recipe.model_copy(update={"method": method})


def _prepare_data(
    recipe: Recipe, tokenizer: LoadedTokenizer, reader: ModalityReader | None, progress: ProgressCallback | None
) -> PreparedData:
    """Return the examples of a recipe. Raises UserError if too many rows are dropped."""
    part = part_of_task(recipe.task)
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
    return data
