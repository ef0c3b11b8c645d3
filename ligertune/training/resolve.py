"""Resolve a recipe: check it, load its configuration, tokenizer and data, and decide every number of the run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Literal

from transformers import PreTrainedConfig

from ligertune.attention.choice import AttentionChoice, why_documents_of_a_row_matter
from ligertune.attention.padding_free import choose_batch_layout, has_one_length
from ligertune.data.batching.largest_batch import ExampleSizes
from ligertune.data.modalities.modality import ModalityReader, modality_of
from ligertune.data.prepare import PreparedData, ProgressCallback, prepare
from ligertune.data.statistics import epoch_rows, summarize_data
from ligertune.files.hub import hub_notes
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
from ligertune.models.quantised_bases.fit_recipe import fit_to_base
from ligertune.models.read_config import read_config
from ligertune.models.score_head import check_task
from ligertune.planning.batch_layout import Rows, choose_packing
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.graph_choice import chooses_cuda_graphs, with_cuda_graphs
from ligertune.planning.make_plan import PlanInputs, make_plan, warn_of_host_memory
from ligertune.planning.memory.activation_policy import recomputes
from ligertune.planning.memory.states import Strategy
from ligertune.planning.options import BatchLayoutOptions, BuildOptions, RunOptions, completed, fuses_lora
from ligertune.planning.parallelism import decided_strategy
from ligertune.planning.plan import BuiltModel, Plan, TeacherPlan
from ligertune.planning.precision import Precision, check_float8, choose_precision
from ligertune.planning.preflight import check_output_dir, check_packages, check_sources
from ligertune.planning.time.open_settings import (
    NOTHING_OPEN,
    OpenSettings,
    with_batch_of_tokens,
    with_train,
    with_usual_values,
)
from ligertune.planning.time.plan_time import with_choice
from ligertune.planning.time.settings_choice import with_tried
from ligertune.recipe.feature import part_of_task
from ligertune.recipe.schema import Recipe
from ligertune.training.build import preview_model
from ligertune.training.checkpoint.choose_checkpoint import continued_recipe
from ligertune.training.checkpoint.load_checkpoint import check_unfinished
from ligertune.training.checks import why_not_packed
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
    of them in one node. processes: number of ranks, if no launcher sets it.
    """
    if not for_show:
        check_output_dir(recipe.checkpoint)
    check_sources(recipe)
    machine = this_machine() if not for_show else simulated_machine(memory_gib=memory_gib, gpus=gpus)
    machine = machine if processes is None else replace(machine, world_size=processes)
    check_packages(recipe)
    check_float8(recipe, machine)
    job = resolve(recipe, machine, progress)
    if for_show:
        return job
    on_this_host = ranks_on_node() if is_launched() else machine.world_size

    def with_warnings(plan: Plan) -> Plan:
        plan = replace(plan, notes=(*plan.notes, *check_unfinished(plan)))
        return warn_of_host_memory(plan, processes=on_this_host, free=available_memory())

    return replace(job, plan=with_warnings(job.plan), plan_with=lambda tried: with_warnings(job.plan_with(tried)))


def resolve(recipe: Recipe, machine: Machine, progress: ProgressCallback | None = None) -> Job:
    """Load everything but the weights, and make the plan. Writes nothing. Raises UserError.

    Each value that the recipe leaves open is decided once: by machine and model, then tokenizer, then data.
    """
    feature = feature_of(recipe.task)
    config = read_config(recipe.model)
    check_task(config, recipe.task)
    given, base_notes = fit_to_base(recipe, config)
    row_ranks = max(1, machine.world_size // recipe.parallel.cp_size)
    recipe = with_usual_values(given, row_ranks)
    written = RunOptions.of(recipe)
    modality = modality_of(config)
    why = _why_not_shared(recipe, written.build, config)
    packing, packing_notes = choose_packing(recipe.data, modality.facts, why)
    precision = choose_precision(recipe.model.dtype, machine, method=recipe.method.type)
    layout = BatchLayoutOptions.of(recipe, packing=packing, why_not_packed=why)
    choose_batch_layout(layout, config, machine, precision)  # refuse impossible settings before data are read
    tokenizer = load_tokenizer(recipe.model)
    check_vocabulary(tokenizer.tokenizer, config)
    token_ids = trained_tokens(tokenizer.tokenizer, recipe.method)
    frozen = feature.frozen_model(written, config, tokenizer.tokenizer, machine, precision)
    reader = modality.load_reader(recipe.model, written.build, tokenizer.tokenizer)
    data = _prepare_data(recipe, tokenizer, reader, progress)
    train = data.examples_in_memory
    complete = _completed(recipe, machine, data, packing=packing, token_ids=token_ids)
    options = RunOptions.of(complete)
    data_notes = feature.check_data(options.build, data, config.get_text_config().vocab_size)
    lengths = None if train is None else train.lengths
    attention, padding_free = choose_batch_layout(layout, config, machine, precision, lengths=lengths)
    teacher = feature.frozen_attention(frozen, options, machine, precision, packed=layout.packing or padding_free)
    multiple_of = max(attention.multiple_of, teacher.multiple_of if teacher else 1)
    rows = epoch_rows(layout, data, multiple_of=multiple_of, padding_free=padding_free)
    complete = _with_batch_of_tokens(complete, given, data, rows, row_ranks)

    model_of = cache(partial(_built_model, options.build, config, attention, machine, precision, teacher))
    inputs = PlanInputs(
        machine=machine,
        precision=precision,
        model=model_of(complete.kernels.recomputed),
        data=summarize_data(data, reader),
        rows=rows,
        why_fsdp="as the launcher configured" if launched_with_fsdp() else "",
        modality=modality.facts,
        teacher=teacher,
        # the same for all settings with one split of the batch
        largest_batch=None if train is None else cache(ExampleSizes.of(train, recipe.train.seed).largest_batch),
    )
    notes = (*recipe.notices, *base_notes, *simulation_notes(machine), *tokenizer.notes, *packing_notes, *data.notes)
    notes = (*notes, *data_notes, *hub_notes())

    def plan_of(recipe: Recipe) -> Plan:
        changed = replace(inputs, model=model_of(recipe.kernels.recomputed))
        return _planned(recipe, changed, layout, data, notes=notes)

    planned = partial(with_choice, plan_of=plan_of, shape=inputs.model.shape)
    open_settings = OpenSettings.of(given, decided=_decided_strategy(given, inputs))
    plan = planned(complete, open_settings, continued=continued_recipe(given) if open_settings else None)
    plan = replace(plan, notes=(*plan.notes, *feature.check_plan(plan, inputs.model.shape, data)))
    return Job(plan, config, tokenizer, data, lambda tried: planned(with_tried(complete, tried), NOTHING_OPEN), reader)


def _decided_strategy(recipe: Recipe, inputs: PlanInputs) -> Strategy | None:
    """Return the strategy that is decided before memory and time are predicted; None if `auto` has a choice."""
    shape = inputs.model.shape
    is_stored = any(kind.stored_size for kind, _ in shape.parameters)
    decided = decided_strategy(recipe, inputs.machine, why_fsdp=inputs.why_fsdp, is_stored=is_stored)
    if decided is not None:
        return decided[0]
    # With a tower memory alone chooses: its work is not predicted, and FSDP2 cannot train it on rows without files.
    return None if shape.tower is None else "ddp"


def _completed(
    recipe: Recipe, machine: Machine, data: PreparedData, *, packing: bool, token_ids: tuple[int, ...]
) -> Recipe:
    fused_lora = fuses_lora(recipe, machine)
    return completed(
        recipe,
        packing=packing,
        kernels={"lora": fused_lora, "recompute": recomputes(recipe, fused_lora=fused_lora)},
        token_ids=token_ids,
        sections=feature_of(recipe.task).resolve(recipe, data),
    )


def _why_not_shared(recipe: Recipe, build: BuildOptions, config: PreTrainedConfig) -> str | None:
    """Return why documents cannot share a row of this model; None if they can, or none shall."""
    if recipe.data.packing is False and recipe.data.padding_free is False:
        return None
    return why_documents_of_a_row_matter(config, recipe.data.max_length) or why_not_packed(build, config)


def _built_model(
    build: BuildOptions,
    config: PreTrainedConfig,
    attention: AttentionChoice,
    machine: Machine,
    precision: Precision,
    teacher: TeacherPlan | None,
    recomputed: Literal["norms", "mlps"] | bool,
) -> BuiltModel:
    """Return the sizes of the model with this `kernels.recompute`, and of the frozen model, if there is one."""
    build = replace(build, kernels=build.kernels.model_copy(update={"recompute": recomputed}))
    model = preview_model(build, config, attention, device=machine.device)
    frozen = teacher.shape if teacher else feature_of(build.task).frozen_copy(build, model.shape, precision)
    return replace(model, frozen_model=frozen)


def _with_batch_of_tokens(complete: Recipe, given: Recipe, data: PreparedData, rows: Rows, row_ranks: int) -> Recipe:
    """Return the recipe with `train.global_batch_tokens` as rows, and a split of them."""
    if given.train.global_batch_tokens is None:
        return complete
    train = data.examples_in_memory
    mean = float(rows.length) if train is None else float(train.lengths.sum()) / rows.count
    split = with_usual_values(with_batch_of_tokens(given, mean, row_ranks), row_ranks).train
    return with_train(
        complete,
        global_batch_tokens=None,
        global_batch_size=split.global_batch_size,
        gradient_accumulation_steps=None,
        per_device_train_batch_size=split.per_device_train_batch_size,
    )


def _planned(
    recipe: Recipe, inputs: PlanInputs, layout: BatchLayoutOptions, data: PreparedData, *, notes: tuple[str, ...]
) -> Plan:
    """Make the plan, and decide `train.cuda_graphs`."""
    graphs = recipe.train.cuda_graphs
    plan = make_plan(with_cuda_graphs(recipe, graphs is True), inputs, notes=notes)
    train = data.examples_in_memory
    # packed rows are padded to one length
    shapes_repeat = layout.packing or has_one_length(None if train is None else train.lengths)
    if graphs != "auto" or not shapes_repeat or not chooses_cuda_graphs(plan, recipe, inputs.modality):
        return plan
    if layout.packing:
        step = replace(layout, few_shapes=True).length_multiple(inputs.rows.multiple_of)
        inputs = replace(inputs, rows=replace(inputs.rows, multiple_of=step))
    plan = make_plan(with_cuda_graphs(recipe, True), inputs, notes=notes)
    execution = replace(plan.build.execution, cuda_graphs="auto")
    return replace(plan, build=replace(plan.build, execution=execution))


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
