"""Resume: check that a checkpoint belongs to this run, and load it with any number of ranks.

FSDP writes states by parameter name, which `torch.distributed.checkpoint` distributes over any number of ranks. A run
with whole models writes weights by name, and optimizer states in the order of the optimizer's parameters, which
sharding does not change. If both runs shard, or neither does, accelerate loads its own files. Random states belong to a
rank; additional ranks start with new ones.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ligertune.errors import UserError, plural
from ligertune.planning.plan import Plan
from ligertune.storage import PROGRESS_FILE
from ligertune.train.distributed import local_shard
from ligertune.train.optim.gradients import unwrap_optimizer

# accelerate's names: folders with the ranks' shards of weights and optimizer states, and the file of whole states
MODEL_SHARDS, OPTIMIZER_SHARDS, OPTIMIZER_FILE = "pytorch_model_fsdp_0", "optimizer_0", "optimizer.bin"


# ---- does the checkpoint belong to this run?


def check_unfinished(plan: Plan) -> None:
    """Raise UserError if a finished run is to be resumed: it would train nothing."""
    path = plan.output_dir / "report.json"
    if plan.checkpoint.resume_from_checkpoint == "never" or not path.is_file():
        return
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["model_path"] is not None and not Path(report["model_path"]).is_dir():
        return  # The model was removed: resuming repeats the last steps and writes it again.
    if report["status"] == "completed" and report["steps"] >= plan.schedule.total_steps:
        raise UserError(
            f"checkpoint.output_dir: the run in {plan.output_dir} is finished ({plural(report['steps'], 'step')}).",
            hint=f"Its model is in {plan.output_dir / 'model'}. To train on, raise train.num_train_epochs; "
            "to start over, use --overwrite.",
        )


def saved_progress(folder: Path, plan: Plan) -> int:
    """Return the step of a checkpoint. Raises UserError if the run that wrote it trained something else."""
    progress = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    saved, now = progress["plan"], dataclasses.asdict(plan)
    batch, batching = saved["batching"]["global_batch_size"], plan.batching
    method, wanted_method = progress.get("method", "full"), plan.build.method.type
    rows, wanted_rows = _name_rows(saved["rows"]), _name_rows(now["rows"])
    optimizer, wanted_optimizer = _name_optimizer(saved["optimizer"]), _name_optimizer(now["optimizer"])
    for (was, wanted), message, hint in (
        (
            (progress["data_fingerprint"], plan.data.fingerprint),
            "was trained on other examples than this recipe gives (data, template or tokenizer changed).",
            "Resume with the recipe that the run was started with, or start a new run in another output_dir.",
        ),
        (
            (batch, batching.global_batch_size),
            f"was trained with a global batch of {batch} examples; this recipe makes it {batching.global_batch_size} "
            f"on {plural(batching.world_size, 'process', 'processes')}.",
            f"Set train.global_batch_size: {batch}.",
        ),
        (
            (rows, wanted_rows),
            f"was trained on {rows}; this recipe makes {wanted_rows}.",
            "Set data.packing, data.max_length and train.group_by_length as they were.",
        ),
        (
            (method, wanted_method),
            f"was trained by {method}; this recipe's method is {wanted_method}.",
            f"Set method.type: {method}.",
        ),
        (
            (optimizer, wanted_optimizer),
            f"holds the states of {optimizer}; this recipe's optimizer is {wanted_optimizer}.",
            "Set train.optim and its settings as they were.",
        ),
    ):
        if was != wanted:
            raise UserError(f"{folder} {message}", hint=hint)
    _check_deepspeed_ranks(folder, saved, plan)
    if progress["step"] > plan.schedule.total_steps:
        raise UserError(
            f"{folder} is at step {progress['step']}, past this recipe's {plural(plan.schedule.total_steps, 'step')}.",
            hint="Raise train.num_train_epochs or train.max_steps.",
        )
    return progress["step"]


def _name_rows(rows: dict) -> str:
    """Return what decides which examples are in a step."""
    return f"{rows['count']} {rows['kind']} rows of at most {rows['length']} tokens"


def _name_optimizer(optimizer: dict) -> str:
    """Return what decides the shapes of an optimizer's states."""
    rank = f" at train.galore.rank: {optimizer['galore']['rank']}" if optimizer["name"] == "galore_adamw" else ""
    return f"{optimizer['name']}{rank}"


def _check_deepspeed_ranks(folder: Path, saved: dict, plan: Plan) -> None:
    """Raise UserError if a DeepSpeed run resumes with other ranks or another strategy: its engine cannot reshard."""
    wrote, reads = ((saved["strategy"], saved["batching"]["world_size"]), (plan.strategy, plan.batching.world_size))
    if wrote != reads and any(strategy.startswith("deepspeed") for strategy, _ in (wrote, reads)):
        raise UserError(
            f"{folder} was written by {plural(wrote[1], 'process', 'processes')} with {wrote[0]}; "
            f"this run has {reads[1]} with {reads[0]}, "
            "and DeepSpeed loads only checkpoints of its own strategy and number of processes.",
            hint="Resume as the run was started; ddp and fsdp resume each other on any number of processes.",
        )


# ---- loading


def load_states(accelerator: Accelerator, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer states into what accelerate prepared, however many ranks wrote them."""
    was_sharded = (folder / MODEL_SHARDS).is_dir()
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if was_sharded == is_sharded:
        accelerator.load_state(str(folder))
    elif was_sharded:
        _gather_shards(folder, accelerator.unwrap_model(model), unwrap_optimizer(optimizer))
    else:
        _shard_weights(folder, model)
        _shard_optimizer(folder, unwrap_optimizer(optimizer))


def _gather_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load all shards into a whole model. Each rank reads them by itself."""
    weights = {"model": get_model_state_dict(model)}
    _read_shards(weights, folder / MODEL_SHARDS)
    set_model_state_dict(model, weights["model"])
    states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _read_shards(states, folder / OPTIMIZER_SHARDS)
    set_optimizer_state_dict(model, optimizer, states["optimizer"])


def _read_shards(into: dict, shards: Path) -> None:
    with warnings.catch_warnings():  # torch warns that there is one process, which is intended
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(into, storage_reader=dcp.FileSystemReader(shards), no_dist=True)


@torch.no_grad()
def _shard_weights(folder: Path, model: nn.Module) -> None:
    """Load whole weights into a sharded model, one tensor at a time from a mapped file: no rank holds a whole model."""
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in tuple(file.keys()):
                parameter = parameters[name]
                local_shard(parameter).copy_(local_shard(_shard_like(file.get_tensor(name), parameter)))


def _shard_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", mmap=True, weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved["state"].items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if value.shape != parameters[index].shape:
                raise UserError(
                    f"{folder} holds optimizer states ({name}) of another shape than their parameter, which cannot be "
                    "sharded.",
                    hint="Resume with parallel.strategy: ddp, or with one process.",
                )
            state[name] = _shard_like(value, parameters[index])
    optimizer.load_state_dict(saved)


def _shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, as `like` is sharded. No communication: every rank has the whole."""
    if not isinstance(like, DTensor):
        return whole
    on_device = whole.to(like.device_mesh.device_type)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
