"""Make the plan of a run from its recipe, the machine, the model's sizes and the prepared data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from ligertune.errors import UserError, format_bytes, plural
from ligertune.hardware import Machine
from ligertune.planning.batch_layout import (
    Batching,
    BatchShape,
    DataSummary,
    Rows,
    choose_batching,
    padding_free_notes,
    trial_batching,
)
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.graph_choice import REACHED_SHARE_OF_PEAK, check_cuda_graphs, cuda_graphs_notes
from ligertune.planning.memory.activation_bytes import CUBLAS_WORKSPACE, TILE
from ligertune.planning.memory.activation_policy import (
    checkpointing_notes,
    choose_policy,
    choose_tile,
    may_tile,
    on_machine,
    suggest_offload,
    with_checkpointed_layers,
)
from ligertune.planning.memory.estimate import MemoryEstimate, initial_adapter_bytes, uncounted
from ligertune.planning.memory.layer_bytes import dequantised_bytes
from ligertune.planning.memory.model_shape import ExpertsShape, ModalityFacts, ModelShape
from ligertune.planning.memory.states import SHARDED_WEIGHTS, StateBytes, Strategy, shards_of, states_of
from ligertune.planning.optimization import (
    FEW_STEPS,
    Cadence,
    TrainSchedule,
    interval,
    make_optimizer,
    make_schedule,
    optimizer_notes,
    total_rows,
)
from ligertune.planning.options import RunOptions
from ligertune.planning.parallelism import (
    DeviceNeed,
    check_four_bit_experts,
    check_stored_base,
    check_strategy,
    check_tower_accumulation,
    choose_strategy,
    quant_storage_notes,
    unsharded_need,
    usable_memory,
)
from ligertune.planning.plan import BuiltModel, Plan, TeacherPlan
from ligertune.planning.precision import Precision, float8_notes
from ligertune.recipe.schema import Recipe

GIB = 2**30
# A step that trains on a row 100 times is a mistake, and a billion times would not end. 8 examples that are packed
# into one row, with the usual batch of 4 and 8 accumulated, give 32 times.
MAX_REPEATS = 100


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made from besides the recipe: device, precision, model without weights, data and its rows."""

    machine: Machine
    precision: Precision
    model: BuiltModel
    data: DataSummary
    rows: Rows
    why_fsdp: str  # why a launcher decided for FSDP; empty if it did not
    modality: ModalityFacts
    teacher: TeacherPlan | None = None
    # (rows, batching, rows of the run) -> the largest micro-batch of the data order; None if the data are streamed
    largest_batch: Callable[[Rows, Batching, int], BatchShape] | None = None

    def batch_of(self, recipe: Recipe, micro_batch_size: int) -> BatchShape:
        """Return the largest micro-batch of a run with this size: of the data order, or as many longest rows."""
        rows = self.rows
        if self.largest_batch is None or not rows.count:
            return BatchShape(micro_batch_size, rows.longest_row(self.data.longest))
        batching = trial_batching(recipe, self.machine.world_size, micro_batch_size)
        train = recipe.train
        in_run = total_rows(
            rows.count, batching.global_batch_size, epochs=train.num_train_epochs, max_steps=train.max_steps
        )
        return self.largest_batch(rows, batching, max(in_run, 1))


MAX_EVALUATION = 0.02  # share of a run that eval.eval_on_start: auto spends on the evaluation before the first step


@dataclass(frozen=True)
class Resources:
    """How a run uses its devices: strategy, model states, memory estimate and batch sizes."""

    strategy: Strategy
    strategy_why: str
    bytes: StateBytes
    memory: MemoryEstimate | None
    batching: Batching
    largest_batch: BatchShape
    tile: int  # tokens per tile of tiled layers; 0: they are not tiled


def make_plan(recipe: Recipe, inputs: PlanInputs, *, notes: tuple[str, ...] = ()) -> Plan:
    """Resolve a recipe. Raises UserError for what cannot be trained."""
    model = inputs.model
    rows = inputs.rows
    data = inputs.data
    check_context(recipe, data.longest, model.shape.context)
    resources = choose_resources(recipe, inputs)
    batching = resources.batching
    schedule = make_schedule(recipe, rows=rows.count, global_batch_size=batching.global_batch_size)
    repeats = repeated_rows(recipe, rows, batching)
    every_save, every_eval = (
        interval(steps, schedule.total_steps) for steps in (recipe.checkpoint.save_steps, recipe.eval.eval_steps)
    )
    if model.shape.tower is not None:
        check_tower_accumulation(recipe, batching.accumulation, model_kind=inputs.modality.model_kind)
    before = evaluates_before_training(recipe, inputs, schedule, batching)
    options = RunOptions.of(recipe)
    plan = Plan(
        build=options.build,
        data_options=options.data_options,
        layout=options.layout,
        parallel=options.parallel,
        checkpoint=options.checkpoint,
        evaluation=options.evaluation.model_copy(update={"eval_on_start": before}),
        logging=options.logging,
        measurement=options.measurement,
        settings=recipe.model_dump(mode="json"),
        num_train_epochs=None if recipe.train.max_steps else recipe.train.num_train_epochs,
        machine=inputs.machine,
        strategy=resources.strategy,
        strategy_why=resources.strategy_why,
        precision=inputs.precision,
        attn_implementation=model.attn_implementation,
        attn_why=model.attn_why,
        model_family=model.shape.family,
        context=model.shape.context,
        n_parameters=model.shape.n_parameters,
        n_trainable=model.shape.n_trainable,
        n_active=model.shape.n_active,
        bytes=resources.bytes,
        memory=resources.memory,
        kernels_backend=model.kernels_backend,
        kernels=model.kernels,
        batching=batching,
        largest_batch=resources.largest_batch,
        tile=resources.tile,
        rows=rows,
        schedule=schedule,
        optimizer=make_optimizer(recipe, heads_lr_multiplier=feature_of(recipe.task).added_lr_multiplier(recipe)),
        data=data,
        save=Cadence(recipe.checkpoint.save_strategy, every_save),
        evaluate=Cadence(recipe.eval.eval_strategy if data.eval_examples else "no", every_eval),
        notes=(*notes, *_notes(recipe, inputs, resources, schedule, repeats)),
        teacher=inputs.teacher,
        carried=model.carried,
    )
    plan = suggest_offload(plan, recipe, REACHED_SHARE_OF_PEAK)
    if recipe.train.cuda_graphs is True:
        check_cuda_graphs(plan, inputs.modality)
    return plan


def _notes(
    recipe: Recipe, inputs: PlanInputs, resources: Resources, schedule: TrainSchedule, repeats: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what a user should know of the plan. repeats: the note on rows that are trained on several times."""
    return (
        *inputs.model.notes,
        *optimizer_notes(recipe.train.optim, inputs.model.shape),
        *repeats,
        *quant_storage_notes(recipe, resources.strategy),
        *padding_free_notes(recipe),
        *cuda_graphs_notes(recipe, inputs.machine),
        *float8_notes(recipe, inputs.machine),
        *_memory_notes(recipe, inputs, resources),
        *_teacher_notes(inputs.teacher, inputs.machine),
        *_few_steps_notes(recipe, inputs, schedule, resources.batching),
    )


def evaluates_before_training(recipe: Recipe, inputs: PlanInputs, schedule: TrainSchedule, batching: Batching) -> bool:
    """Resolve eval.eval_on_start. auto: whether the evaluation takes less than MAX_EVALUATION of the training's time.

    Both are estimated by their tokens. The length of a stream is not known before, so there is none.
    """
    rows = inputs.rows
    data = inputs.data
    if recipe.eval.eval_on_start != "auto":
        return recipe.eval.eval_on_start
    if not data.eval_examples or not rows.count:
        return False
    trained = schedule.total_steps * min(batching.global_batch_size, rows.count) * data.tokens / rows.count
    # An evaluation is a forward: a third of a step with its backward, half of one without gradients of weights. With a
    # teacher or a frozen backbone the forward may be nearly all of a step.
    share = 1 / 2 if recipe.method.type in ("lora", "qlora") else 1 / 3
    share = 1 if inputs.teacher is not None or feature_of(recipe.task).forward_only else share
    return share * data.eval_tokens < MAX_EVALUATION * trained


def choose_resources(recipe: Recipe, inputs: PlanInputs) -> Resources:
    """Choose strategy, micro-batch and checkpointed layers by the memory estimate."""
    machine = inputs.machine
    shape = inputs.model.shape
    world_size = machine.world_size
    dtype = inputs.precision.weights

    @cache
    def batch_of(micro: int) -> BatchShape:
        return inputs.batch_of(recipe, micro)

    def need(micro: int) -> DeviceNeed:
        unsharded = states_of(recipe, shape.parameters, dtype)
        estimate = estimate_memory(recipe, inputs, unsharded)
        return unsharded_need(unsharded, estimate, machine, batch=batch_of(micro))

    is_stored = any(kind.stored_size for kind, _ in shape.parameters)
    strategy, why = choose_strategy(recipe, machine, why_fsdp=inputs.why_fsdp, need=need, is_stored=is_stored)
    check_strategy(recipe, strategy, autocast=inputs.precision.autocast)
    check_four_bit_experts(recipe, strategy, experts=bool(shape.layer and shape.layer.experts))
    check_stored_base(recipe, strategy, is_stored=is_stored)
    states = states_of(recipe, shape.parameters, dtype, strategy=strategy, world_size=world_size)
    shards = shards_of(recipe.parallel.dp_replicate_size, strategy, world_size) if strategy in SHARDED_WEIGHTS else 1
    memory = estimate_memory(recipe, inputs, states, shards=shards)
    if memory is not None and strategy == "ddp":
        memory = replace(memory, keeps_gradients=True)
    memory, tiled, tile = _tiled(recipe, inputs, memory, strategy)

    def fits(estimate: MemoryEstimate | None, micro: int, accumulates: bool) -> bool:
        if estimate is None:
            return False
        batch = batch_of(micro)
        device = machine.memory_bytes
        return estimate.fits(batch.rows, batch.row_length, accumulates=accumulates, memory=device, labels=batch.labels)

    batching = choose_batching(recipe, world_size)
    batch = batch_of(batching.micro_batch_size)
    accumulates = batching.accumulation > 1
    usable = replace(machine, memory_bytes=usable_memory(machine))
    memory = with_checkpointed_layers(recipe, memory, batch, usable, accumulates=accumulates)
    if tiled is not None and not fits(memory, batching.micro_batch_size, accumulates):
        memory = tiled
        tile = TILE
    return Resources(strategy, why, states, memory, batching, batch, tile)


def _tiled(
    recipe: Recipe, inputs: PlanInputs, memory: MemoryEstimate | None, strategy: Strategy
) -> tuple[MemoryEstimate | None, MemoryEstimate | None, int]:
    """Return (the estimate with the recipe's tiles, one with those that `auto` may choose or None, the tile)."""
    applied = inputs.model.applied_kernels
    tile = choose_tile(recipe, inputs.model.shape.family, applied, strategy)
    if tile and memory is not None:
        return memory.tiled(tile), None, tile
    may = inputs.machine.device == "cuda" and may_tile(recipe, memory, applied, strategy)
    return memory, memory.tiled(TILE) if may and memory is not None else None, tile


def _cublas_bytes(recipe: Recipe, machine: Machine) -> int:
    """Return the bytes of cuBLAS's workspaces: each stream has its own, and CUDA graphs are recorded on a second."""
    streams = 2 if recipe.train.cuda_graphs is True else 1
    return streams * CUBLAS_WORKSPACE if machine.device == "cuda" else 0


def _adapter_bytes(shape: ModelShape, itemsize: int) -> int:
    """Return the bytes of one layer's adapters in the compute dtype, and of their new gradients in float32.

    Those of a mixture count with its experts.
    """
    if shape.layer is None or shape.layer.experts is not None:
        return 0
    elements = sum(kind.elements * number for kind, number in shape.parameters if kind.adapter and kind.inside)
    bare = shape.in_front + sum(number for layer, number in shape.other_layers if not layer.adapters)
    return elements // max(1, shape.num_hidden_layers - bare) * (itemsize + 4)


def _dense_bytes(recipe: Recipe, shape: ModelShape, experts: ExpertsShape | None, itemsize: int) -> int:
    """Return the bytes of weights that exist in the compute dtype while a layer computes."""
    method = recipe.method
    has_packed_experts = method.type == "qlora" or any(k.experts and k.stored_size for k, _ in shape.parameters)
    found = dequantised_bytes(experts, itemsize) if has_packed_experts else 0
    # The backward of an 8-bit layer dequantises its weight.
    eight_bit = (k.elements for k, _ in shape.parameters if k.in_eight_bits(method.stored_as))
    found += itemsize * max(eight_bit, default=0)
    # The buffer of the largest weight of few bits in the compute dtype; experts have their own memory.
    of_few_bits = (k for k, _ in shape.parameters if (k.quantised(method.type) or k.stored_size) and not k.experts)
    found += max((k.elements * (itemsize + k.unpacked_size) for k in of_few_bits), default=0)
    if method.use_dora:  # PEFT's norm of a weight: the product of B and A, its transpose, and the sum
        linear = (k.elements for k, _ in shape.parameters if k.linear and k.inside and not k.adapter)
        found += 3 * itemsize * max(linear, default=0)
    return found


def estimate_memory(
    recipe: Recipe, inputs: PlanInputs, states: StateBytes, *, shards: int = 1
) -> MemoryEstimate | None:
    """Return the memory estimate of a step, or None for a model whose layers are not understood.

    There is also none for Medusa heads whose logits are materialised, or that several ranks share.
    """
    model = inputs.model
    data = inputs.data
    precision = inputs.precision
    applied = model.applied_kernels
    feature = feature_of(recipe.task)
    shape = model.shape
    policy = choose_policy(recipe, model.attn_implementation, applied, loss_kernel=feature.loss_kernel)
    if shape.layer is None or shape.head is None or not shape.predicts_heads(shards, policy.fused_loss):
        return None
    itemsize = 2 if precision.weights == "bfloat16" or precision.autocast == "fp16" else 4
    policy = on_machine(policy, shape.mixer, itemsize, inputs.machine)
    dequantised = _dense_bytes(recipe, shape, shape.layer.experts, itemsize)
    return MemoryEstimate(
        states=states,
        layer=shape.layer,
        head=shape.head,
        policy=policy,
        layers=shape.num_hidden_layers,
        itemsize=itemsize,
        labelled=data.trained_tokens / data.tokens if data.tokens else 1.0,
        workspace=dequantised + _adapter_bytes(shape, itemsize) + _cublas_bytes(recipe, inputs.machine),
        recorded_buffer=dequantised if recipe.train.cuda_graphs is True else 0,
        uncounted=uncounted(shards, shape.mixers) if inputs.machine.device == "cuda" else 0.0,
        # the graphs of a step's first and later micro-batches each read their own copy
        input_copies=3 if recipe.train.cuda_graphs is True else 1,
        optim_in_backward=recipe.train.optim_in_backward,
        tower=shape.tower,
        image_share=data.image_share,
        shards=shards,
        reshards=recipe.parallel.reshard_after_forward is not False,
        cp_size=recipe.parallel.cp_size,
        longest_document=data.longest,
        cpu_offload=recipe.parallel.cpu_offload,
        in_front=shape.in_front,
        heads=shape.heads,
        frozen_model=model.frozen_model,
        other_layers=shape.other_layers,
        loss_chunk=feature.loss_chunk_rows(recipe),
        loading=initial_adapter_bytes(shape) if recipe.method.init_from_weights else 0,
    )


def host_memory_parts(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return recipe key and value -> (bytes per process, bytes once per host), without empty parts.

    Paged optimizers are not counted: their states move to the host only when the device is full.
    """
    states = plan.bytes
    batch = plan.largest_batch
    activations = plan.memory.host_bytes(batch.rows, batch.row_length) if plan.memory else 0
    method = plan.build.method
    reads_original = method.type == "qlora" and method.init_from_weights  # the weights before quantisation
    original = (plan.n_parameters - plan.n_trainable) * (4 if plan.precision.weights == "float32" else 2)
    parts = {
        f"train.gradient_checkpointing: {plan.build.execution.gradient_checkpointing}": (activations, 0),
        "train.optim_offload: true": (states.in_host_memory * plan.optimizer.offload, 0),
        "parallel.cpu_offload: true": (states.total * plan.parallel.cpu_offload, 0),
        "distill.teacher_offload: true": (plan.teacher.shape.in_host_memory if plan.teacher else 0, 0),
        f"method.init_lora_weights: {method.init_lora_weights}": (original if reads_original else 0, 0),
    }
    if plan.checkpoint.async_save and plan.checkpoint.save_strategy != "no":
        copied = states.trained + states.saved_states
        copies = (copied, 0) if plan.shares_weights else (0, copied)  # under FSDP each process copies its shards
        parts["checkpoint.async_save: true"] = copies
    return {key: sizes for key, sizes in parts.items() if any(sizes)}


def warn_of_host_memory(plan: Plan, *, processes: int, free: int | None) -> Plan:
    """Return the plan, with a note if its `processes` on this host would keep more than `free` bytes in host memory.

    Linux kills a process that takes more memory than there is, by a signal that it cannot handle. It is a note and not
    an error, because a virtual machine may receive more memory when it takes more.
    """
    if plan.machine.device == "cpu" or free is None:
        return plan
    parts = host_memory_parts(plan)
    needed = sum(processes * per_process + once for per_process, once in parts.values())
    if needed <= free:
        return plan
    named = [
        f"{key}, {(per_process or once) / GIB:.1f} GiB{' per process' if per_process and processes > 1 else ''}"
        for key, (per_process, once) in parts.items()
    ]
    note = (
        f"this host has {free / GIB:.1f} GiB of free memory, and this run will keep {needed / GIB:.1f} GiB there "
        f"({'; '.join(named)}): Linux kills the run if the host cannot provide it"
    )
    return replace(plan, notes=(*plan.notes, note))


def check_host_memory(plan: Plan) -> None:
    """Raise UserError for a run on a CPU that needs more memory than the host has: Linux would kill it.

    Only model states are certain. The prediction of activations is that of a GPU.
    """
    needed = plan.bytes.total * plan.machine.world_size
    there = plan.machine.memory_bytes
    if plan.machine.device == "cpu" and there and needed > there:
        raise UserError(
            f"The weights, gradients and optimizer states need {format_bytes(needed)}, and this host has"
            f" {format_bytes(there)} of memory.",
            hint="Use a smaller model, or train an adapter (method.type: lora) with a smaller lora_r.",
        )


def check_context(recipe: Recipe, longest: int, context: int | None) -> None:
    """Raise UserError if an example is longer than the model's context."""
    if context is not None and longest > context:
        raise UserError(
            f"data.max_length: {recipe.data.max_length} allows an example of {longest} tokens, "
            f"but the model's context (max_position_embeddings) is {context}.",
            hint=f"Write data.max_length: {context}, or model.rope_parameters for longer texts.",
        )


def repeated_rows(recipe: Recipe, rows: Rows, batching: Batching) -> tuple[str, ...]:
    """Return a warning if a step has more rows than the data. Raises UserError for more than MAX_REPEATS times as many.

    The last step of a run of epochs may have fewer rows.
    """
    size = batching.global_batch_size
    epochs = recipe.train.num_train_epochs
    in_step = size if recipe.train.max_steps else min(size, round((epochs or 1.0) * rows.count))
    if rows.streamed or in_step <= rows.count:
        return ()
    sentence = (
        f"a step has {in_step:,} rows ({batching.micro_batch_size} per device x {batching.accumulation} accumulated x"
        f" {plural(batching.row_ranks, 'process', 'processes')}), and the data {plural(rows.count, 'row')}"
    )
    if in_step > MAX_REPEATS * rows.count:
        raise UserError(
            f"train.per_device_train_batch_size x train.gradient_accumulation_steps: {sentence}, so that it would train"
            f" on each more than {MAX_REPEATS} times.",
            hint=f"Lower them, or train.global_batch_size, to {plural(rows.count, 'row')} in a step.",
        )
    return (f"{sentence}: it trains on some more than once",)


def _memory_notes(recipe: Recipe, inputs: PlanInputs, resources: Resources) -> tuple[str, ...]:
    memory = resources.memory
    batch = resources.largest_batch
    machine = inputs.machine
    accumulates = resources.batching.accumulation > 1
    notes = checkpointing_notes(recipe, memory, batch, machine, accumulates=accumulates)
    if resources.tile:
        notes += (f"train.tiled_mlp: MLPs and projections run on {resources.tile:,} tokens at a time",)
    if memory is None or machine.device != "cuda":
        return notes
    return (*notes, *memory.host_notes(batch.rows, batch.row_length))


def _teacher_notes(teacher: TeacherPlan | None, machine: Machine) -> tuple[str, ...]:
    if teacher is None or machine.world_size == 1:
        return () if teacher is None else teacher.notes
    size = format_bytes(teacher.shape.weights + teacher.shape.in_host_memory)
    return (*teacher.notes, f"distill: each of {machine.world_size} processes holds the whole teacher, {size}")


def _few_steps_notes(
    recipe: Recipe, inputs: PlanInputs, schedule: TrainSchedule, batching: Batching
) -> tuple[str, ...]:
    """Return a note if packing and the batch size leave very few optimizer steps, with the keys that give more."""
    rows = inputs.rows
    if recipe.train.max_steps or rows.streamed or schedule.total_steps >= FEW_STEPS:
        return ()
    examples = plural(inputs.data.examples, rows.example_noun)
    packed = f", packed into {plural(rows.count, 'row')}" if rows.packed else ""
    size = plural(batching.global_batch_size, "row" if rows.packed else rows.example_noun)
    ways = _ways_to_more_steps(recipe, inputs, batching)
    return (
        f"The whole run has only {plural(schedule.total_steps, 'optimizer step')}: {examples}{packed}, and a step "
        f"takes {size}. For more steps, write {', '.join(ways[:-1])}{' or ' if len(ways) > 1 else ''}{ways[-1]}.",
    )


def _ways_to_more_steps(recipe: Recipe, inputs: PlanInputs, batching: Batching) -> list[str]:
    rows = inputs.rows
    train = recipe.train
    ways = [f"a larger train.num_train_epochs (now {train.num_train_epochs:g})"]
    if rows.count == 1:
        pass  # a smaller batch has no more steps
    elif train.global_batch_size is not None and train.global_batch_size > 1:
        ways.append(f"a smaller train.global_batch_size (now {train.global_batch_size})")
    elif batching.micro_batch_size > 1:
        ways.append(f"a smaller train.per_device_train_batch_size (now {batching.micro_batch_size})")
    if rows.count > 1 and train.global_batch_size is None and batching.accumulation > 1:
        ways.append(f"a smaller train.gradient_accumulation_steps (now {batching.accumulation})")
    if rows.packed and inputs.data.examples > rows.count:
        ways.append("data.packing: false")
    return ways
