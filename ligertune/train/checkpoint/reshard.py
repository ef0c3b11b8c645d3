"""Resuming on another number of processes: states of FSDP's ranks in one process or in DDP's, and the other way round.

A checkpoint of FSDP has states by parameter names, which torch.distributed.checkpoint cuts anew for any number of ranks
that share them. One of a whole model has weights by name and optimizer states in the order of the optimizer's
parameters, which sharding does not change. Where the kind stays, accelerate reads its own. Random states are of a rank,
and other ranks begin with new ones.
"""

from __future__ import annotations

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

from ligertune.errors import UserError
from ligertune.train.optim.gradients import unwrap_optimizer

# as accelerate names them: a folder with the ranks' parts of the weights, and one with those of the optimizer
MODEL_PARTS, OPTIMIZER_PARTS = "pytorch_model_fsdp_0", "optimizer_0"
OPTIMIZER = "optimizer.bin"


def load_states(accelerator: Accelerator, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights and optimizer states of a checkpoint into what `accelerator` prepared, however many ranks wrote it."""
    was_sharded = (folder / MODEL_PARTS).is_dir()
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if was_sharded == is_sharded:
        accelerator.load_state(str(folder))
    elif was_sharded:
        _join(folder, accelerator.unwrap_model(model), unwrap_optimizer(optimizer))
    else:
        _cut_weights(folder, model)
        _cut_optimizer(folder, unwrap_optimizer(optimizer))


def _join(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each process reads all parts: none waits for another."""
    weights = {"model": get_model_state_dict(model)}
    _read(weights, folder / MODEL_PARTS)
    set_model_state_dict(model, weights["model"])
    states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _read(states, folder / OPTIMIZER_PARTS)
    set_optimizer_state_dict(model, optimizer, states["optimizer"])


def _read(into: dict, parts: Path) -> None:
    with warnings.catch_warnings():  # that there is but one process, which is what was meant
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(into, storage_reader=dcp.FileSystemReader(parts), no_dist=True)


@torch.no_grad()
def _cut_weights(folder: Path, model: nn.Module) -> None:
    """One tensor at a time, from a mapped file: ranks share the pages, and none holds a whole model."""
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in tuple(file.keys()):
                mine = parameters[name]
                part = _part_of(file.get_tensor(name), mine)
                (mine.to_local() if isinstance(mine, DTensor) else mine).copy_(
                    part.to_local() if isinstance(part, DTensor) else part
                )


def _cut_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    saved = torch.load(folder / OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved["state"].items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if value.shape != parameters[index].shape:
                raise UserError(
                    f"{folder} holds optimizer states ({name}) that processes which share the model cannot cut.",
                    hint="Resume with parallel.strategy: ddp, or with one process.",
                )
            state[name] = _part_of(value, parameters[index])
    optimizer.load_state_dict(saved)


def _part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `whole`, cut as `like` is; nothing is sent, for every rank has the whole."""
    if not isinstance(like, DTensor):
        return whole
    on_device = whole.to(like.device_mesh.device_type)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
