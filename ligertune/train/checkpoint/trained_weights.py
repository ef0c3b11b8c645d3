"""Only the weights that train: what a checkpoint of an adapter holds, and what is kept of the best model.

An adapter of an 8B model has 170 MB, and the weights it stands beside have 16 GB that nobody changes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ligertune.errors import UserError

FILE = "trained.safetensors"


def save_only_what_trains(accelerator: Accelerator, model: nn.Module) -> None:
    """Where some weights are frozen, let accelerate's states hold the others only. FSDP and ZeRO save theirs."""
    own = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if own or all_train(model):
        return

    def save(models: list[nn.Module], weights: list[dict], folder: str) -> None:
        weights.clear()  # accelerate then writes none
        if accelerator.is_main_process:
            save_trained(accelerator.unwrap_model(models[0]), Path(folder) / FILE)

    def load(models: list[nn.Module], folder: str) -> None:
        load_trained(accelerator.unwrap_model(models.pop()), Path(folder) / FILE)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def all_train(model: nn.Module) -> bool:
    """Whether no weight is frozen."""
    return all(p.requires_grad for p in model.parameters())


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter, for those that train; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_trained(model: nn.Module, path: Path) -> None:
    """Write them as safetensors."""
    save_file({name: p.detach().contiguous() for name, p in trained(model).items()}, path)


@torch.no_grad()
def load_trained(model: nn.Module, path: Path) -> None:
    """Read them back into the model where it is; a UserError where they are those of another method."""
    saved = load_file(path)
    for name, parameter in trained(model).items():
        if name not in saved or saved[name].shape != parameter.shape:
            raise UserError(
                f"{path} holds other weights than this recipe trains: {name} is not there, or has another shape.",
                hint="Write the method section as it was when the run was started.",
            )
        parameter.copy_(saved[name])


def load_weights(model: nn.Module, folder: Path) -> None:
    """All weights of a checkpoint; tied ones are in it once."""
    load_checkpoint_in_model(model, str(folder))
    model.tie_weights()
