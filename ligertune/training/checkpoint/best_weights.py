"""`output_dir/best`: the trainable weights of the best evaluation, with their checksum."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from ligertune.errors import UserError
from ligertune.files.storage import new_folder, read_object, write_json, writing
from ligertune.training.checkpoint.checkpoint_record import difference, file_checksums
from ligertune.training.checkpoint.load_checkpoint import explain_unusable
from ligertune.training.checkpoint.trained_weights import FILE, load_trained, save_weights, trained
from ligertune.training.parallel.distributed import full_state_dict, is_sharded

FOLDER = "best"
RECORD = "best.json"


def save_best(accelerator: Accelerator, model: nn.Module, output_dir: Path, *, step: int, loss: float) -> None:
    """Replace the trainable weights in `output_dir/best`, atomically. All ranks call it."""
    weights = full_state_dict(accelerator, model)
    if accelerator.is_main_process:
        if weights is None:
            weights = trained(accelerator.unwrap_model(model))
        else:
            # Save tied weights once: they may share memory, which safetensors refuses under two names.
            once = {t.data_ptr(): name for name, t in reversed(weights.items())}
            weights = {name: weights[name] for name in once.values()}
        with writing("The best weights"), new_folder(output_dir / FOLDER) as aside:
            save_weights(weights, aside / FILE)
            write_json(aside / RECORD, {"step": step, "eval_loss": loss, "files": file_checksums(aside, [FILE])})
    accelerator.wait_for_everyone()


def load_best(accelerator: Accelerator, model: nn.Module, output_dir: Path) -> tuple[int, dict[str, Tensor] | None]:
    """Load the best weights into `model`; return (their step, the weights instead if the model is sharded).

    Raises UserError if they are damaged.
    """
    folder = output_dir / FOLDER
    damage = damage_of_best(output_dir)
    if damage is not None:
        raise UserError(
            f"The best weights in {folder} are damaged: {damage}.",
            hint="Continue with --resume, which makes them again from an earlier checkpoint if there is one.",
            exit_code=1,
        )
    record = read_object(folder / RECORD)
    assert record is not None  # `damage_of_best` has read it
    step: int = record["step"]
    with explain_unusable(folder):
        if is_sharded(accelerator):
            return step, load_file(folder / FILE)
        load_trained(accelerator.unwrap_model(model), folder / FILE)
    return step, None


def damage_of_best(output_dir: Path) -> str | None:
    """Return how `output_dir/best` differs from what was written, or None."""
    folder = output_dir / FOLDER
    record = read_object(folder / RECORD)
    if record is None:
        return f"{folder / RECORD} is missing or damaged"
    files = record.get("files")
    sums = files.get(FILE) if isinstance(files, dict) else None
    if not isinstance(sums, list) or [type(number) for number in (record.get("step"), *sums)] != [int, int, int]:
        return f"{folder / RECORD} is damaged"
    return difference(folder, {FILE: tuple(sums)})
