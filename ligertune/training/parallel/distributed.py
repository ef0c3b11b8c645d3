"""accelerate: start DDP, FSDP2, HSDP or DeepSpeed ZeRO; process-group timeouts; reductions over ranks.

FSDP2 wraps in `Accelerator.prepare`, which calls `fully_shard` on each transformer layer and on the model, as the
plugin of `start_accelerator` configures it. On CPU processes gloo replaces NCCL; tests use this.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    convert_outputs_to_fp32,
    set_seed,
)
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.distributed_c10d import _set_pg_timeout  # torch has no public way; torchtitan uses it too
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from ligertune.data.batching.context_parallel import ContextParallelSplit
from ligertune.models.quantised_bases.packed_linear import PackedLinear
from ligertune.patching.host_copy import HostCopy
from ligertune.planning.plan import Plan

LONG_TIMEOUT = timedelta(minutes=30)  # where rank 0 works alone: it writes checkpoints and answers sample prompts
# Elements. ZeRO-3 keeps smaller parameters (norms, biases) whole on each rank.
ZERO3_PERSISTENCE_THRESHOLD = 10_000
ZERO_STAGES = {"deepspeed_zero2": 2, "deepspeed_zero3": 3}


def start_accelerator(plan: Plan) -> Accelerator:
    """Join the processes that a launcher started, or run alone.

    The loop accumulates gradients itself (it divides the loss by the tokens of the global batch), so accelerate does
    not. Autocast is off for bfloat16 weights that train themselves.
    """
    # save_state warns of every tied weight, although it saves each once and ties them again on loading.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    on_cpu = plan.machine.vendor == "cpu"
    zero = plan.strategy in ZERO_STAGES
    hsdp = _hsdp_config(plan)
    fsdp = fsdp_plugin(plan)
    _clear_launcher_environment(plan)
    # An earlier run in this process may have used another precision and destroyed its process group.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    if zero and on_cpu:
        # accelerate offers DeepSpeed only on accelerators, unless the process group exists already.
        PartialState(cpu=True, timeout=LONG_TIMEOUT)
    accelerator = Accelerator(
        cpu=on_cpu and not zero,
        mixed_precision="bf16" if zero and plan.precision.weights == "bfloat16" else plan.precision.autocast,
        deepspeed_plugin=_deepspeed_plugin(plan) if zero else None,
        gradient_accumulation_steps=1,
        step_scheduler_with_optimizer=False,
        fsdp_plugin=None if on_cpu else fsdp,
        parallelism_config=None if on_cpu else hsdp,
        log_with=[name for name in plan.logging.report_to if name != "jsonl"] or None,  # we write metrics.jsonl
        project_dir=str(plan.output_dir / "trackers"),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=LONG_TIMEOUT),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # without it DDP keeps the gradients twice
        ],
    )
    if zero:
        # transformers holds a weak reference to this and would partition weights while it loads them, but kernels are
        # recognised on whole weights.
        accelerator.state.deepspeed_plugin.dschf = None
    if fsdp is not None and on_cpu:
        _force_fsdp_on_cpu(accelerator, fsdp, hsdp)
    set_seed(plan.build.seed, device_specific=True)  # each rank draws its own dropout
    return accelerator


def fsdp_plugin(plan: Plan) -> FullyShardedDataParallelPlugin | None:
    """Return the configuration of FSDP2, which wraps each transformer layer; None for other strategies."""
    if plan.strategy != "fsdp":
        return None
    if plan.parallel.cpu_offload:  # accelerate then starts gloo in addition to NCCL, for gradients on the host
        os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
    # The plugin takes missing arguments from the launcher's environment, but the plan decides these. Without a policy
    # accelerate would round the losses and the adapters' gradients to the dtype of the autocast.
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        mixed_precision_policy=MixedPrecisionPolicy(),
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=plan.parallel.reshard_after_forward is not False,
        cpu_offload=plan.parallel.cpu_offload,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )


def _hsdp_config(plan: Plan) -> ParallelismConfig | None:
    """Return how ranks form replicas of a sharded model (HSDP); None for one replica. Neighbouring ranks share one."""
    replicas = plan.parallel.dp_replicate_size
    if replicas == 1:
        return None
    # torch warns about a mesh name that accelerate chooses; users cannot change it.
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
    # accelerate takes missing sizes from the launcher's environment, so all are given.
    return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=plan.shards, tp_size=1, cp_size=1, sp_size=1)


def _deepspeed_plugin(plan: Plan) -> DeepSpeedPlugin:
    """Return the configuration of ZeRO: stage 2 shards gradients and optimizer states, stage 3 also the weights.

    Call it before the Accelerator is made, which reads the environment variable. DeepSpeed's engine clips and steps by
    itself, inside the backward of the last micro-batch.
    """
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    plugin = DeepSpeedPlugin(
        zero_stage=ZERO_STAGES[plan.strategy],
        gradient_accumulation_steps=1,
        gradient_clipping=plan.optimizer.max_grad_norm,
        zero3_init_flag=False,  # by default stage 3 partitions weights as they are made; see `start_accelerator`
        zero3_save_16bit_model=True,  # without it accelerate's `get_state_dict` raises under stage 3
    )
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = plan.batching.micro_batch_size
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = ZERO3_PERSISTENCE_THRESHOLD
    return plugin


def wrap_layers_that_are_there(accelerator: Accelerator, model: nn.Module) -> None:
    """Name the layers that FSDP2 wraps: a model may name others, which accelerate would look for."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.transformer_cls_names_to_wrap is None:
        named = set(getattr(model, "_no_split_modules", None) or ())
        plugin.transformer_cls_names_to_wrap = sorted(named & {type(module).__name__ for module in model.modules()})


def autocast_under_fsdp(accelerator: Accelerator, model: nn.Module) -> None:
    """Let the forward autocast under FSDP2, with outputs in float32: accelerate does so under all other strategies."""
    if not (accelerator.distributed_type == DistributedType.FSDP and accelerator.native_amp):
        return
    forward = model.forward

    @functools.wraps(forward)
    def autocast_forward(*args: object, **kwargs: object) -> object:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    model.forward = convert_outputs_to_fp32(autocast_forward)


def _clear_launcher_environment(plan: Plan) -> None:
    """Remove variables by which `accelerate launch` would choose another strategy than the plan."""
    if plan.strategy == "ddp":
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    if plan.strategy not in ZERO_STAGES:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def _force_fsdp_on_cpu(
    accelerator: Accelerator, fsdp: FullyShardedDataParallelPlugin, hsdp: ParallelismConfig | None
) -> None:
    """Enable FSDP2 on CPU processes: accelerate refuses it there, although `fully_shard` works with gloo."""
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = fsdp
    if hsdp is not None:
        accelerator.state.parallelism_config = hsdp
        accelerator.state.device_mesh = hsdp.get_device_mesh("cpu")


def leave_four_bit_weights(model: nn.Module) -> None:
    """Keep DDP from sending packed weights and experts in few bits to the other ranks, which have the same bytes."""
    packed = {id(p) for m in model.modules() if isinstance(m, PackedLinear) for p in m.parameters(recurse=False)}
    names = [name for name, p in model.named_parameters() if isinstance(p, QuantisedWeight) or id(p) in packed]
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def leave_quant_states(model: nn.Module) -> None:
    """Keep the scales of bitsandbytes' 4-bit layers out of state dicts: each process computes them from the base model.

    Under FSDP2 they are in a saved state dict once a layer has run, and no layer that has not run can load them.
    """

    def drop(layer: nn.Module, states: dict[str, Tensor], prefix: str, metadata: object) -> None:
        for name in [name for name in states if name.startswith(f"{prefix}weight.")]:
            del states[name]

    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and not hasattr(module, "base_layer"):
            module.register_state_dict_post_hook(drop)


def launched_with_fsdp() -> bool:
    """Return whether `accelerate launch --use_fsdp` (or its configuration file) started this process."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


class ProcessGroupTimeout:
    """Process-group timeouts: `parallel.timeout` inside steps, 30 minutes while a rank may work alone.

    In a step, ranks differ only by the work of a batch, so a rank that hangs is noticed within a minute. In the first
    step kernels are compiled; during saves and evaluations rank 0 writes and generates alone. After a timeout gloo
    raises in the waiting ranks and NCCL's watchdog ends them; then the launcher ends the hung rank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        seconds: int,
        context_parallel: ContextParallelSplit | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._step_timeout = timedelta(seconds=seconds)
        self._groups = _process_groups(model) if accelerator.num_processes > 1 else []
        self._groups += [] if context_parallel is None else [context_parallel.group]
        self._set(LONG_TIMEOUT)  # the groups of a device mesh start with torch's default of 10 minutes

    def enter_steps(self) -> None:
        """Use the short timeout from now on. All ranks call it."""
        self._set(self._step_timeout)

    @contextlib.contextmanager
    def extended(self) -> Iterator[None]:
        """Use the long timeout inside. All ranks call it."""
        before = self._timeout
        self._set(LONG_TIMEOUT)
        yield
        self._set(before)

    def leave_steps(self) -> None:
        """Use the long timeout from now on."""
        self._set(LONG_TIMEOUT)

    def _set(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if not self._groups:
            return
        if timeout != LONG_TIMEOUT:
            # A rank that is ahead must not apply the short timeout to a rank that still works under the long one.
            self._accelerator.wait_for_everyone()
        for group in self._groups:
            _set_pg_timeout(timeout, group)


def _process_groups(model: nn.Module) -> list[ProcessGroup | None]:
    """Return the default group (None) and the groups of the device meshes of sharded parameters."""
    meshes = {p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}
    return [None, *(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))]


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed's engine clips gradients and steps the optimizer."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def reduce_sum(accelerator: Accelerator, value: Tensor) -> Tensor:
    """Return the sum over ranks of a tensor on the device."""
    if accelerator.num_processes == 1:
        return value
    return accelerator.reduce(value, reduction="sum")


def reduce_max(accelerator: Accelerator, value: Tensor) -> Tensor:
    """Return the largest values over ranks of a tensor on the device."""
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return value


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Return whether the flag is set on any rank. All ranks must leave the loop after the same step."""
    return bool(reduce_sum(accelerator, torch.tensor(float(flag), device=accelerator.device)) > 0)


def max_over_ranks(accelerator: Accelerator, amounts: dict[str, int]) -> dict[str, int]:
    """Return the maximum over ranks of each amount."""
    if accelerator.num_processes == 1:
        return amounts
    local = torch.tensor(list(amounts.values()), device=accelerator.device, dtype=torch.float64)
    return dict(zip(amounts, accelerator.gather(local[None]).amax(0).long().tolist(), strict=True))


def reshard(model: nn.Module) -> None:
    """Shard the FSDP2 units again that stay gathered after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(value: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that FSDP2 may hold as a DTensor."""
    return value.to_local() if hasattr(value, "to_local") else value


def full_tensor(value: Tensor) -> Tensor:
    """Return the whole of a tensor that FSDP2 may hold as a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def full_state_dict(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor] | None:
    """Return the whole model's weights on the CPU if ranks share them; None if this rank's model is whole.

    Under FSDP every rank gets them, under ZeRO-3 the main rank only.
    """
    return accelerator.get_state_dict(model) if is_sharded(accelerator) else None


def trained_state_dict(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor] | None:
    """Return what `full_state_dict` does; under FSDP without frozen weights, and on the main rank alone."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return unfrozen_states(model, whole=True)
    return full_state_dict(accelerator, model)


def unfrozen_states(model: nn.Module, *, whole: bool = False) -> dict[str, Tensor]:
    """Return the parameters that train, and all buffers, by name: this rank's shards. Tied parameters have two names.

    whole: gathered in host memory, for the main rank alone. All ranks call it.
    """
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole, ignore_frozen_params=True)
    # the option leaves the second names of tied frozen parameters in
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in get_model_state_dict(model, options=options).items() if name not in frozen}


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether each rank holds only a part of the weights."""
    if uses_deepspeed(accelerator):
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == DistributedType.FSDP


class HostThrottle:
    """Keep the host one step ahead of its device, and agree over ranks on the step after which all stop.

    Called after each training step and each evaluation batch. It waits for the device to finish the step before. The
    host runs no further ahead, because a process that receives SIGTERM first waits for all launched work. A single
    process stops at once. Several ranks stop one step after the signal, because an answer within the same step would
    need a device synchronisation in every step.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._before: HostCopy | None = None

    def __call__(self, stop: bool) -> bool:
        """Return whether all ranks stop after this step. stop: this rank has received a signal."""
        # torch.full launches a kernel; torch.tensor would copy from the host, which synchronises.
        flag = torch.full((), float(stop), device=self._accelerator.device)
        before = self._before
        self._before = HostCopy(reduce_sum(self._accelerator, flag))
        late = before is not None and bool(before.read() > 0)
        return late if self._accelerator.num_processes > 1 else stop
