"""Activation policy of a run: what its kernels save, and how many layers are checkpointed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from ligertune_kernels.chips import Chip
from ligertune_kernels.ops.recurrence.kda.tiles import KdaTiles, kda_tiles
from ligertune_kernels.ops.recurrence.ssd.tiles import SsdTiles, ssd_tiles
from ligertune_kernels.ops.recurrence.tiles import DeltaTiles, delta_tiles

from ligertune.errors import UserError, format_bytes, plural
from ligertune.hardware import Machine
from ligertune.planning.batch_layout import BatchShape
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.memory.activation_bytes import TILE, ActivationPolicy
from ligertune.planning.memory.estimate import MemoryEstimate, largest
from ligertune.planning.memory.layer_bytes import Float8
from ligertune.planning.memory.mixer_shapes import ChannelDeltaShape, DeltaRuleShape, Mamba2Shape, MixerShape
from ligertune.planning.memory.states import Strategy
from ligertune.planning.plan import Plan
from ligertune.planning.time.step_time import HOST_LINK_BANDWIDTH
from ligertune.recipe.rules.check_rules import contradicts_itself
from ligertune.recipe.schema import Recipe

GATED_MLPS = {"swiglu", "geglu", "reglu"}
MIXERS = {"gated_delta_rule", "ssd", "kda", "causal_conv1d"}
# `layers: auto` is suggested if it checkpoints at most this share of the layers.
WORTH_SUGGESTING = 0.9
# `offload` is suggested if it saves at least this share of a step's memory: the estimate is not more exact.
WORTH_OFFLOADING = 0.03


def adapters_copy_inputs(recipe: Recipe, *, fused_lora: bool) -> bool:
    """Whether LoRA layers save a copy of their input, so that `kernels.recompute` frees nothing."""
    method = recipe.method
    return method.type in ("lora", "qlora") and (method.use_dora or (method.lora_dropout > 0 and not fused_lora))


def recomputes(recipe: Recipe, *, fused_lora: bool) -> Literal["norms", "mlps"] | bool:
    """Resolve `kernels.recompute`. auto: norms and gated products, where fused adapters train.

    LoRA of Llama-3-8B, 2 x 4,096 tokens, H200: 39.5 GiB in place of 50.3 for 1.4 % of a step; the norms' part is 4 GiB
    for 0.4 %.
    """
    wanted = recipe.kernels.recompute
    if wanted != "auto":
        return wanted
    if not fused_lora or recipe.method.type not in ("lora", "qlora") or adapters_copy_inputs(recipe, fused_lora=True):
        return False
    kernels = recipe.kernels.model_copy(update={"recompute": True})
    return not contradicts_itself(recipe.model_copy(update={"kernels": kernels}))


def choose_policy(
    recipe: Recipe, attn_implementation: str, applied: Collection[str], *, loss_kernel: str = "linear_cross_entropy"
) -> ActivationPolicy:
    """Return what the forward saves, given the names of the applied kernels. All layers are checkpointed, or none.

    loss_kernel: the kernel that computes the loss of the recipe's task in the output head.
    """
    fuses_lora = recipe.kernels.fuses_lora and not recipe.train.torch_compile
    copies = adapters_copy_inputs(recipe, fused_lora=fuses_lora)
    drops = recipe.method.type in ("lora", "qlora") and recipe.method.lora_dropout > 0
    return ActivationPolicy(
        fused_norm="rms_norm" in applied,
        fused_mlp=not {"swiglu", "geglu", "reglu", "experts"}.isdisjoint(applied),
        fused_experts="experts" in applied,
        fused_loss=loss_kernel in applied,
        attention=attn_implementation,
        mixer_chunk=64 if not MIXERS.isdisjoint(applied) else 0,
        checkpointing=recipe.train.gradient_checkpointing,
        recompute=recipe.kernels.recomputed if "recompute" in applied and not copies else False,
        float8=_float8_of(recipe) if "float8_linear" in applied else "no",
        float8_mlp="swiglu_float8" in applied,
        fused_lora=fuses_lora and not copies,
        lora_dropout=drops,
        dora=recipe.method.type in ("lora", "qlora") and recipe.method.use_dora,
    )


def mixer_chunk(mixer: MixerShape, itemsize: int, machine: Machine) -> int:
    """Return the tokens per chunk of our recurrence on the machine; 0: no kernel runs heads of this width."""
    if machine.vendor == "cpu":
        return ActivationPolicy.mixer_chunk
    # the tiles read vendor, architecture and width of a warp, which is 64 on CDNA (gfx9) alone
    warp_size = 64 if machine.arch.startswith("gfx9") else 32
    chip = Chip(machine.vendor, machine.arch, warp_size, processors=1, l2_bytes=1)
    tiles: DeltaTiles | SsdTiles | KdaTiles | None
    if isinstance(mixer, Mamba2Shape):
        tiles = ssd_tiles(mixer.state_dim, mixer.head_dim, itemsize, chip)
    elif isinstance(mixer, ChannelDeltaShape):
        tiles = kda_tiles(max(mixer.key_dim, mixer.value_dim), itemsize, chip)
    elif isinstance(mixer, DeltaRuleShape):
        tiles = delta_tiles(max(mixer.key_dim, mixer.value_dim), itemsize, chip)
    else:
        return 1  # a convolution has no chunks, and runs everywhere
    return 0 if tiles is None else tiles.chunk


def on_machine(policy: ActivationPolicy, mixer: MixerShape | None, itemsize: int, machine: Machine) -> ActivationPolicy:
    """Return the policy with the chunks of the machine's kernels."""
    if mixer is None or not policy.mixer_chunk:
        return policy
    return replace(policy, mixer_chunk=mixer_chunk(mixer, itemsize, machine))


def _float8_of(recipe: Recipe) -> Float8:
    if recipe.train.fp8 == "torchao":
        return "compiled" if recipe.train.torch_compile else "eager"
    return "kernels"


def may_tile(recipe: Recipe, estimate: MemoryEstimate | None, applied: Collection[str], strategy: Strategy) -> bool:
    """Whether `train.tiled_mlp: auto` may choose tiles: nothing in the recipe excludes them, and their memory is known.

    It does not choose checkpointing, so `train.gradient_checkpointing` must be set.
    """
    if recipe.train.tiled_mlp != "auto" or estimate is None or estimate.layer.experts is not None:
        return False
    if strategy not in ("single", "ddp") or estimate.heads is not None or GATED_MLPS.isdisjoint(applied):
        return False
    return not contradicts_itself(
        recipe.model_copy(update={"train": recipe.train.model_copy(update={"tiled_mlp": True})})
    )


def choose_tile(recipe: Recipe, model_family: str, applied: Collection[str], strategy: Strategy) -> int:
    """Return the tokens per tile that the recipe asks for, or 0. Raises UserError if the layers cannot be tiled."""
    wanted = recipe.train.tiled_mlp
    if wanted == "auto" or wanted is False:
        return 0
    why = None
    if GATED_MLPS.isdisjoint(applied):
        why = f"no MLP of {model_family} is one that our kernels compute"
    elif "experts" in applied:
        why = f"{model_family} is a mixture of experts"
    elif strategy not in ("single", "ddp"):
        why = f"each process holds a part of the weights ({strategy})"
    if why is not None:
        raise UserError(f"train.tiled_mlp: {why}.", hint="Leave it out.")
    return TILE if wanted is True else wanted


def with_checkpointed_layers(
    recipe: Recipe, estimate: MemoryEstimate | None, batch: BatchShape, machine: Machine, *, accumulates: bool
) -> MemoryEstimate | None:
    """Return the estimate with the layers checkpointed that `train.gradient_checkpointing_layers` asks for.

    `auto` checkpoints as few layers as fit on the device, or all if none do. Raises UserError for more layers than the
    model has, and for a number or `auto` if no memory is predicted.
    """
    wanted = recipe.train.gradient_checkpointing_layers
    if not recipe.train.gradient_checkpointing or wanted == "all":
        return estimate
    if estimate is None:
        raise UserError(
            f"train.gradient_checkpointing_layers: {wanted} needs the memory plan, and there is none: "
            f"{feature_of(recipe.task).why_no_memory}.",
            hint="Leave it out: all layers are checkpointed then.",
        )
    if wanted == "auto":
        return _with_fewest_layers(estimate, batch, machine, accumulates=accumulates)
    if wanted > estimate.layers:
        raise UserError(
            f"train.gradient_checkpointing_layers: {wanted}, but the model has {plural(estimate.layers, 'layer')}.",
            hint="Write a smaller number, or leave it out: all layers are checkpointed then.",
        )
    return estimate.with_checkpointing(not_checkpointed=estimate.layers - wanted)


def _with_fewest_layers(
    estimate: MemoryEstimate, batch: BatchShape, machine: Machine, *, accumulates: bool
) -> MemoryEstimate:
    memory = machine.memory_bytes

    def fits(not_checkpointed: int) -> bool:
        some = estimate.with_checkpointing(not_checkpointed=not_checkpointed)
        return some.fits(batch.rows, batch.row_length, accumulates=accumulates, memory=memory, labels=batch.labels)

    return estimate.with_checkpointing(not_checkpointed=largest(fits, limit=estimate.layers))


def checkpointing_notes(
    recipe: Recipe, estimate: MemoryEstimate | None, batch: BatchShape, machine: Machine, *, accumulates: bool
) -> tuple[str, ...]:
    """Return a note if some layers are not checkpointed, or if fewer layers would be enough."""
    wanted = recipe.train.gradient_checkpointing_layers
    key = "train.gradient_checkpointing"
    if estimate is None or estimate.policy.tile or not recipe.train.gradient_checkpointing:
        return ()
    if wanted != "all":
        checkpointed = estimate.layers - estimate.policy.not_checkpointed
        return (f"{key}_layers: {wanted}: {checkpointed} of {estimate.layers} layers are checkpointed",)
    frozen_model = estimate.heads is not None and not estimate.heads.joint
    if machine.device == "cpu" or frozen_model or estimate.shards > 1:  # the prediction under sharding is less exact
        return ()
    fewest = _with_fewest_layers(estimate, batch, machine, accumulates=accumulates)
    needed = estimate.layers - fewest.policy.not_checkpointed
    if needed == 0:
        return (f"{key}: by the memory plan this device has room for all activations without checkpointing",)
    if needed <= WORTH_SUGGESTING * estimate.layers:
        return (f"{key}: {key}_layers: auto would checkpoint {needed} of {estimate.layers} layers instead of all",)
    return ()


def suggest_offload(plan: Plan, recipe: Recipe, reached_share: float) -> Plan:
    """Return the plan, with a note if offloading the layers' inputs saves memory and its copies take no time.

    One process only: several of a host share its links. reached_share: FLOP/s of a step over the device's peak.
    """
    train = recipe.train
    machine = plan.machine
    memory = plan.memory
    if train.gradient_checkpointing is not True or train.fp8 or memory is None or memory.tower is not None:
        return plan
    if machine.device != "cuda" or machine.world_size > 1 or not machine.peak_flops:
        return plan
    if not _copies_hide(plan, memory, reached_share * machine.peak_flops):
        return plan
    if checkpointing_notes(
        recipe, memory, plan.largest_batch, machine, accumulates=plan.batching.accumulation > 1
    ):  # fewer checkpointed layers
        return plan
    with_offload = recipe.model_copy(update={"train": train.model_copy(update={"gradient_checkpointing": "offload"})})
    if contradicts_itself(with_offload):
        return plan
    offloading = replace(memory, policy=replace(memory.policy, checkpointing="offload"))
    before = _peak_bytes(plan, memory)
    saved = before - _peak_bytes(plan, offloading)
    if saved < WORTH_OFFLOADING * before:
        return plan
    in_host_memory = offloading.host_bytes(plan.largest_batch.rows, plan.largest_batch.row_length)
    note = (
        f"train.gradient_checkpointing: offload would need {format_bytes(saved)} less device memory, for "
        f"{format_bytes(in_host_memory)} of pinned host memory; by estimate, a layer's input is copied in less time "
        "than its forward takes"
    )
    return replace(plan, notes=(*plan.notes, note))


def _peak_bytes(plan: Plan, memory: MemoryEstimate) -> int:
    """Return the bytes of the plan's step by a memory estimate."""
    accumulates = plan.batching.accumulation > 1
    on_device = plan.machine.memory_bytes
    batch = plan.largest_batch
    peak = memory.peak(batch.rows, batch.row_length, accumulates=accumulates, memory=on_device, labels=batch.labels)
    return peak.total


def _copies_hide(plan: Plan, memory: MemoryEstimate, flops: float) -> bool:
    """Return whether a layer's input is copied to the host in less time than the layer's forward takes, per token."""
    in_layers = (plan.n_active or plan.n_parameters) - memory.head.elements * memory.head.weights
    forward_seconds = 2 * in_layers / memory.layers / flops
    copy_seconds = memory.layer.hidden * memory.itemsize / HOST_LINK_BANDWIDTH
    return copy_seconds < forward_seconds
