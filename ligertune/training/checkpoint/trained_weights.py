"""Trainable weights as one safetensors file: checkpoints of adapters, and the weights of the best evaluation.

LoRA on an 8B model trains 170 MB; the other 16 GB do not change, so checkpoints leave them out.
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ligertune.errors import UserError
from ligertune.models.adapters.initial_lora import initial_factors, restore_initial

FILE = "trained.safetensors"


def save_only_what_trains(accelerator: Accelerator, model: nn.Module) -> None:
    """Leave frozen weights out of accelerate's checkpoints. FSDP and ZeRO save the whole model."""
    shards_itself = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if shards_itself or all_train(model):
        return

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        weights.clear()  # accelerate then writes none
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(models[0])
            save_weights(trained(model) | initial_factors(model), Path(folder) / FILE)

    def load(models: list[nn.Module], folder: str) -> None:
        load_trained(accelerator.unwrap_model(models.pop()), Path(folder) / FILE)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def all_train(model: nn.Module) -> bool:
    """Return whether no weight is frozen."""
    return all(p.requires_grad for p in model.parameters())


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name. Tied parameters have one name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write weights as safetensors."""
    save_file({name: t.detach().contiguous() for name, t in weights.items()}, path)


@torch.no_grad()
def load_trained(model: nn.Module, path: Path) -> None:
    """Load trainable parameters in place. Raises UserError if the file lacks one, or has another shape of it."""
    saved = load_file(path)
    for name, parameter in trained(model).items():
        if name not in saved or saved[name].shape != parameter.shape:
            raise UserError(
                f"{path} holds other weights than this recipe trains: {name} is missing or has another shape.",
                hint="Write the method section as it was when the run was started.",
            )
        parameter.copy_(saved[name])
    restore_initial(model, saved)
