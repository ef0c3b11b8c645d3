"""`train.cuda_graphs`: whether the micro-batches of a run are recorded as CUDA graphs.

A recording serves batches of one shape on one GPU. `auto` records where shapes repeat, the host would launch kernels
slower than the GPU runs them, and memory has room for the recording.
"""

from __future__ import annotations

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.memory.model_shape import ModalityFacts
from ligertune.planning.plan import Plan
from ligertune.recipe.rules.check_rules import contradicts_itself
from ligertune.recipe.schema import Recipe

# Attention that handles all documents of a row in one launch, independent of where they begin.
ONE_LAUNCH = ("document_attention", "varlen", "flash_attention_2")
# Milliseconds of the host for forward and backward of a layer, low guesses, at the pace `host_pace.REFERENCE`. A layer
# of Llama-3.2-1B took 4.7 on 128 tokens (H100, most of it host time) and 5.4 on 4,096, one of Qwen2.5-0.5B 4.7 on
# 8,192; in the last two the GPU was idle for a third of the time or more (H200, `scripts/bench host_time`). With LoRA
# it was 6.6 on a fast host and 10.9 on a busy one, with QLoRA 9.2 to 11.7 on slow hosts (H200, `scripts/bench choice`).
# With float8, 16 layers of 6 keep the host as long as the GPU takes for 8,192 tokens of Llama-3.2-1B, 96 ms.
HOST_MS = {"full": 4.5, "lora": 9.0, "qlora": 9.0, "float8": 6.5}
HOST_OF_EXPERTS = 1.2  # times: 7 to 14 ms for a layer of OLMoE with LoRA, by the host's pace (the same script)
HOST_OF_MIXERS = 1.25  # times: 7.5 to 15 ms for a layer of Qwen3.5-4B with LoRA (the same script)
SHARDED_MS = 1.5  # the same of FSDP2's gathers, copies and reductions, a guess
FLOAT8_TIME = 0.75  # of a step's time in bfloat16 on the GPU: 8,192 tokens of Llama-3.2-1B on an H200
RUN_AGAIN = 1.5  # times the work of the host if layers are checkpointed
MEASURED_ON = ("sm90",)  # with dense models; mixtures were not measured
REACHED_SHARE_OF_PEAK = 0.5  # FLOP/s of a whole step over the device's peak


def with_cuda_graphs(recipe: Recipe, on: bool) -> Recipe:
    """Return the recipe with `train.cuda_graphs` decided."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"cuda_graphs": on})})


def chooses_cuda_graphs(plan: Plan, recipe: Recipe, modality: ModalityFacts) -> bool:
    """Resolve `auto` by the plan without graphs, of a run whose shapes repeat."""
    machine = plan.machine
    if machine.arch not in MEASURED_ON or not machine.peak_flops or plan.memory is None or plan.n_active is not None:
        return False
    if contradicts_itself(with_cuda_graphs(recipe, True)) or not _is_host_bound(plan, machine.peak_flops):
        return False
    try:
        check_cuda_graphs(plan, modality)
    except UserError:
        return False
    peak = plan.peak
    assert peak is not None  # it is predicted where plan.memory is
    states = peak.weights + peak.optimizer + peak.frozen_model
    # a recording keeps the memory of its activations, and batches that are not recorded need it once more
    return 2 * peak.total - states <= machine.memory_bytes


def host_seconds(plan: Plan) -> float:
    """Return the guess of the host's time for the launches of a micro-batch."""
    assert plan.memory is not None  # callers have looked
    execution = plan.build.execution
    layer = HOST_MS.get(plan.build.method.type, HOST_MS["full"])
    if execution.fp8 is True:
        layer = max(layer, HOST_MS["float8"])
    layer *= HOST_OF_EXPERTS if plan.n_active is not None else 1.0
    layer *= HOST_OF_MIXERS if plan.memory.has_mixers else 1.0
    if plan.shares_weights:
        layer += SHARDED_MS
    layers = plan.memory.layers
    checkpointed = layers - plan.memory.policy.not_checkpointed if execution.gradient_checkpointing else 0
    return (layers - checkpointed + RUN_AGAIN * checkpointed) * layer * 1e-3


def _is_host_bound(plan: Plan, peak_flops: float) -> bool:
    tokens = plan.batching.micro_batch_size * plan.row_length
    device = (4.0 * plan.n_parameters + 2.0 * plan.n_trainable) * tokens / (REACHED_SHARE_OF_PEAK * peak_flops)
    if plan.build.execution.fp8 is True:
        device *= FLOAT8_TIME
    return device <= host_seconds(plan)


def check_cuda_graphs(plan: Plan, modality: ModalityFacts) -> None:
    """Raise UserError if a step cannot be recorded for `train.cuda_graphs`."""
    if plan.strategy != "single":
        raise UserError(
            f"train.cuda_graphs records the work of one process, and parallel.strategy is {plan.strategy} here.",
            hint="Write parallel.num_processes: 1, or leave train.cuda_graphs out.",
        )
    if not modality.reads_text_only:
        raise UserError(
            f"train.cuda_graphs: {plan.model_family} reads {modality.inputs}, which give each batch another shape.",
            hint="Leave it out.",
        )
    if plan.precision.autocast == "fp16":
        raise UserError(
            f"train.cuda_graphs: {plan.machine.name} trains in float16, whose loss scale changes between steps.",
            hint="Leave it out.",
        )
    if plan.rows.is_padding_free and plan.machine.device == "cuda" and plan.attn_implementation not in ONE_LAUNCH:
        raise UserError(
            f"train.cuda_graphs: the launches of {plan.attn_implementation} attention depend on the documents of each "
            f"row ({plan.attn_why}).",
            hint="Write data.packing: false, or leave train.cuda_graphs out.",
        )


def cuda_graphs_notes(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    """Return a note about the memory that `train.cuda_graphs` needs, or that it has no effect on a CPU."""
    if recipe.train.cuda_graphs is not True:
        return ()
    if machine.device != "cuda":
        return ("train.cuda_graphs has no effect on a CPU",)
    return (
        "train.cuda_graphs keeps the memory of activations and loss allocated: the first batch of another shape and "
        "each evaluation need their memory in addition",
    )
