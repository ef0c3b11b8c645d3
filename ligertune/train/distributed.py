"""The door to accelerate: one process or many, DDP or FSDP2, on GPUs or (for tests) on CPUs with gloo."""

from __future__ import annotations

import logging
import os
import warnings

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, set_seed
from torch import nn

from ligertune.planning.plan import Plan
from ligertune.train.process_group_timeout import LONG
from ligertune.train.trackers import tracker_names
from ligertune.train.zero import STAGES, is_zero, load_whole_models, zero_plugin


def start(plan: Plan) -> Accelerator:
    """Join the processes that a launcher started, or run alone.

    Accumulation is the loop's own (the loss is normalised by the global batch), so accelerate is told of none, and
    autocast is fp16 or nothing: bfloat16 runs have bfloat16 weights.
    """
    # save_state warns of every tied weight, which it saves once and ties again on loading
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    on_cpu = plan.machine.vendor == "cpu"
    sharded, zero = plan.strategy == "fsdp", plan.strategy in STAGES
    plugin, copies = None, copies_of(plan)
    if sharded:
        if plan.parallel.cpu_offload:  # accelerate then starts gloo beside NCCL, for gradients in host memory
            os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
        # the plugin fills what is not given from the launcher's environment; the plan decides these
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_offload=plan.parallel.cpu_offload,
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
        )
    elif plan.strategy == "ddp":
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    if not zero:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    # a run before this one in the same process may have had another precision, and ended the group of its processes
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    if zero and on_cpu:
        # accelerate offers DeepSpeed on accelerators only, unless the processes have met already
        PartialState(cpu=True, timeout=LONG)
    accelerator = Accelerator(
        cpu=on_cpu and not zero,
        mixed_precision="bf16" if zero and plan.precision.weights == "bfloat16" else plan.precision.autocast,
        deepspeed_plugin=zero_plugin(plan) if zero else None,
        gradient_accumulation_steps=1,
        step_scheduler_with_optimizer=False,
        fsdp_plugin=None if on_cpu else plugin,
        parallelism_config=None if on_cpu else copies,
        log_with=tracker_names(plan) or None,
        project_dir=str(plan.output_dir / "trackers"),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=LONG),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # or DDP holds a second copy of the gradients
        ],
    )
    if zero:
        load_whole_models(accelerator)
    if sharded and on_cpu:
        # accelerate offers FSDP on accelerators only, yet what it calls (fully_shard) runs on CPU processes with gloo
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        if copies is not None:
            accelerator.state.parallelism_config = copies
            accelerator.state.device_mesh = copies.get_device_mesh("cpu")
    set_seed(plan.build.seed, device_specific=True)  # of dropout, which is each rank's own
    return accelerator


def copies_of(plan: Plan) -> ParallelismConfig | None:
    """HSDP: how ranks divide into copies of the model; None where all share one. Neighbours share, as on a node.

    All of them are data parallel. What is not given, accelerate takes from the launcher's environment.
    """
    copies = plan.parallel.dp_replicate_size
    if copies == 1:
        return None
    # torch says so of a name that accelerate gives its mesh, and the user can do nothing about it
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
    return ParallelismConfig(dp_replicate_size=copies, dp_shard_size=plan.shards, tp_size=1, cp_size=1, sp_size=1)


def launched_with_fsdp() -> bool:
    """Whether `accelerate launch --use_fsdp` (or its configuration file) started this process."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def reduce_sum(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a scalar on the device."""
    if accelerator.num_processes == 1:
        return value
    return accelerator.reduce(value, reduction="sum")


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is set on any rank: all ranks must leave the loop after the same step."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), reduction="sum") > 0)


def most_over_ranks(accelerator: Accelerator, amounts: dict[str, int]) -> dict[str, int]:
    """The largest of each amount."""
    if accelerator.num_processes == 1:
        return amounts
    mine = torch.tensor(list(amounts.values()), device=accelerator.device, dtype=torch.float64)
    return dict(zip(amounts, accelerator.gather(mine[None]).amax(0).long().tolist(), strict=True))


def after_evaluation(model: nn.Module) -> None:
    """FSDP2 leaves the last unit gathered after a forward without backward; shard it again."""
    if hasattr(model, "reshard"):
        model.reshard()


def full_state_dict(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The whole model's weights on the main rank's CPU where ranks share them; None where the model can be saved.

    Every rank has them after FSDP, and the main one alone after ZeRO.
    """
    return accelerator.get_state_dict(model) if is_sharded(accelerator) else None


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each rank holds a part of the weights."""
    if is_zero(accelerator):
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == DistributedType.FSDP
