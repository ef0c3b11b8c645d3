"""Weight files that accelerate does not write: trainable weights alone, the best weights, scales of float8 layers.

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
from ligertune.files.storage import new_folder, read_object, write_json, writing
from ligertune.models.adapters.initial_lora import initial_factors, restore_initial
from ligertune.models.float8.delayed_scales import DelayedScales
from ligertune.models.float8.float8_linear import scales_of
from ligertune.training.checkpoint.checkpoint_record import difference, file_checksums
from ligertune.training.checkpoint.load_checkpoint import explain_unusable, load_whole_weights
from ligertune.training.parallel.distributed import is_sharded, trained_state_dict

TRAINED_FILE = "trained.safetensors"
INITIAL_FILE = "initial_lora.safetensors"  # next to shards
SCALES_FILE = "float8_scales.safetensors"
BEST_FOLDER = "best"
BEST_RECORD = "best.json"


def save_only_what_trains(accelerator: Accelerator, model: nn.Module) -> None:
    """Leave frozen weights out of accelerate's checkpoints. ZeRO saves the whole model; `Saver` writes FSDP's."""
    shards_itself = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if shards_itself or all_train(model):
        return

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        weights.clear()  # accelerate then writes none
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(models[0])
            save_weights(trained(model) | initial_factors(model), Path(folder) / TRAINED_FILE)

    def load(models: list[nn.Module], folder: str) -> None:
        # `pop`: accelerate loads the weights of the models that are left
        load_trained(accelerator.unwrap_model(models.pop()), Path(folder) / TRAINED_FILE)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def all_train(model: nn.Module) -> bool:
    """Return whether no weight is frozen."""
    return all(p.requires_grad for p in model.parameters())


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name. Tied parameters have one name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write weights as safetensors, which refuses strided views."""
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


def restore_saved_initial(model: nn.Module, folder: Path) -> None:
    """Let the weights be those that the initial adapters of a checkpoint leave, before ranks share them.

    No change for adapters that leave the weights alone, and for shards of earlier versions, which lack them.
    """
    if initial_factors(model):
        for path in (path for path in (folder / TRAINED_FILE, folder / INITIAL_FILE) if path.is_file()):
            restore_initial(model, load_file(path))


# ---- the best evaluation


def save_best(accelerator: Accelerator, model: nn.Module, output_dir: Path, *, step: int, loss: float) -> None:
    """Replace the trainable weights in `output_dir/best`, with their checksum, atomically. All ranks call it."""
    weights = trained_state_dict(accelerator, model)
    if accelerator.is_main_process:
        if weights is None:
            weights = trained(accelerator.unwrap_model(model))
        else:
            # Save tied weights once: they may share memory, which safetensors refuses under two names.
            once = {t.data_ptr(): name for name, t in reversed(weights.items())}
            weights = {name: weights[name] for name in once.values()}
        with writing("The best weights"), new_folder(output_dir / BEST_FOLDER) as aside:
            save_weights(weights, aside / TRAINED_FILE)
            checksums = file_checksums(aside, [TRAINED_FILE])
            write_json(aside / BEST_RECORD, {"step": step, "eval_loss": loss, "files": checksums})
    accelerator.wait_for_everyone()


def load_best(accelerator: Accelerator, model: nn.Module, output_dir: Path) -> tuple[int, dict[str, Tensor] | None]:
    """Load the best weights into `model`; return (their step, the weights instead under ZeRO-3).

    Raises UserError if they are damaged.
    """
    folder = output_dir / BEST_FOLDER
    damage = damage_of_best(output_dir)
    if damage is not None:
        raise UserError(
            f"The best weights in {folder} are damaged: {damage}.",
            hint="Continue with --resume, which makes them again from an earlier checkpoint if there is one.",
            exit_code=1,
        )
    record = read_object(folder / BEST_RECORD)
    assert record is not None  # `damage_of_best` has read it
    step: int = record["step"]
    with explain_unusable(folder):
        if accelerator.distributed_type == DistributedType.FSDP:
            load_whole_weights(folder, accelerator.unwrap_model(model))
        elif is_sharded(accelerator):
            return step, load_file(folder / TRAINED_FILE)
        else:
            load_trained(accelerator.unwrap_model(model), folder / TRAINED_FILE)
    return step, None


def damage_of_best(output_dir: Path) -> str | None:
    """Return how `output_dir/best` differs from what was written, or None."""
    folder = output_dir / BEST_FOLDER
    record = read_object(folder / BEST_RECORD)
    if record is None:
        return f"{folder / BEST_RECORD} is missing or damaged"
    files = record.get("files")
    sums = files.get(TRAINED_FILE) if isinstance(files, dict) else None
    # type(), not isinstance: True is an int, too
    if not isinstance(sums, list) or [type(number) for number in (record.get("step"), *sums)] != [int, int, int]:
        return f"{folder / BEST_RECORD} is damaged"
    return difference(folder, {TRAINED_FILE: tuple(sums)})


# ---- scales of float8 layers: a resumed run rounds as an uninterrupted one


def save_float8_scales(accelerator: Accelerator, model: nn.Module) -> None:
    """Add the scales of the model's float8 layers to accelerate's checkpoints, and load them from there.

    A checkpoint of a run without float8 has none: its first step is scaled like the first of any run.
    """
    scales = scales_of(model)
    if scales is None:
        return

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        if accelerator.is_main_process:
            write_scales(scales, Path(folder))

    def load(models: list[nn.Module], folder: str) -> None:
        read_scales(scales, Path(folder))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def write_scales(scales: DelayedScales, folder: Path) -> None:
    """Write the scales, which ranks share, into the folder of a checkpoint."""
    save_file(scales.state(), folder / SCALES_FILE)


def read_scales(scales: DelayedScales, folder: Path) -> None:
    """Load the scales of a checkpoint, if it has some. Raises UserError for those of another model."""
    path = folder / SCALES_FILE
    if not path.exists():
        return
    try:
        scales.load(load_file(path))
    except ValueError as error:
        raise UserError(
            f"{path} does not fit this model: {error}.",
            hint="Resume with the recipe that the run was started with, or start a new run in another output_dir.",
        ) from error
