"""Resume: check that a checkpoint belongs to this run, and load it with any number of ranks.

FSDP writes states by parameter name, which `torch.distributed.checkpoint` distributes over any number of ranks. A run
with whole models writes weights by name, and optimizer states in the order of the optimizer's parameters, which
sharding does not change. If neither run shards, accelerate loads its own files. Frozen weights stay those of the base
model, as at the start. Random states belong to a rank; additional ranks start with new ones.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME, SCALER_NAME, DistributedType, load
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor, distribute_tensor

from ligertune.errors import UserError, message_of, plural
from ligertune.files.storage import PROGRESS_FILE, read_object
from ligertune.models.adapters.initial_lora import PREFIX
from ligertune.planning.plan import Plan
from ligertune.training.checkpoint.checkpoint_record import CheckpointRecord, DamagedRecordError
from ligertune.training.optim.combined import keep_settings
from ligertune.training.optim.gradients import unwrap_optimizer
from ligertune.training.parallel.distributed import local_shard, unfrozen_states

# accelerate's names: folders with the ranks' shards of weights and optimizer states, and the file of whole states
MODEL_SHARDS = "pytorch_model_fsdp_0"
OPTIMIZER_SHARDS = "optimizer_0"
OPTIMIZER_FILE = "optimizer.bin"


# ---- does the checkpoint belong to this run?


def check_unfinished(plan: Plan) -> tuple[str, ...]:
    """Raise UserError if a finished run is to be resumed: it would train nothing. Return a note on a damaged report."""
    path = plan.output_dir / "report.json"
    if plan.checkpoint.resume_from_checkpoint == "never" or not path.exists():
        return ()
    report = read_object(path) or {}
    status, steps, model_path = (report.get(name) for name in ("status", "steps", "model_path"))
    if not isinstance(status, str) or type(steps) is not int or not isinstance(model_path, str | None):
        return (f"{path} is damaged and left alone: whether the run is finished follows from its checkpoints",)
    if model_path is not None and not Path(model_path).is_dir():
        return ()  # The model was removed: resuming repeats the last steps and writes it again.
    if status == "completed" and steps >= plan.schedule.total_steps:
        raise UserError(
            f"checkpoint.output_dir: the run in {plan.output_dir} is finished ({plural(steps, 'step')}).",
            hint=f"Its model is in {plan.output_dir / 'model'}. To train on, raise train.num_train_epochs; "
            "to start over, use --overwrite.",
        )
    return ()


def saved_progress(folder: Path, plan: Plan) -> int:
    """Return the step of a checkpoint. Raises UserError if the run that wrote it trained something else."""
    try:
        saved = CheckpointRecord.read(folder)
    except DamagedRecordError as problem:
        raise UserError(f"{folder} is damaged: {PROGRESS_FILE} {problem}.") from problem
    now = CheckpointRecord.of(plan, saved.step, {})
    for was, wanted, message, hint in _comparisons(saved, now):
        if was != wanted:
            raise UserError(f"{folder} {message}", hint=hint)
    _check_deepspeed_ranks(folder, saved, now)
    if saved.step > plan.schedule.total_steps:
        raise UserError(
            f"{folder} is at step {saved.step}, past this recipe's {plural(plan.schedule.total_steps, 'step')}.",
            hint="Raise train.num_train_epochs or train.max_steps.",
        )
    return saved.step


def _comparisons(saved: CheckpointRecord, now: CheckpointRecord) -> tuple[tuple[object, object, str, str], ...]:
    """Return (value of the checkpoint, value of this run, message, hint) of everything that must be equal."""
    processes = plural(now.world_size, "process", "processes")
    return (
        (
            saved.seed,
            now.seed,
            f"was trained with train.seed: {saved.seed}; this recipe has {now.seed}, which orders data otherwise.",
            f"Set train.seed: {saved.seed}.",
        ),
        (saved.method, now.method, *_about_method(saved.method, now.method)),
        (
            saved.model,
            now.model,
            f"was trained on a {saved.model}; this recipe's model is a {now.model}.",
            "Resume with the model that the run was started with, or start a new run in another output_dir.",
        ),
        (
            saved.base or now.base,  # checkpoints of earlier versions do not say it
            now.base,
            f"was trained on another base model ({saved.base}; this recipe's is {now.base}).",
            "Set model.model_name_or_path, model.revision and model.dtype as they were, with the files that were there,"
            " or start a new run in another output_dir.",
        ),
        (
            saved.data_fingerprint,
            now.data_fingerprint,
            "was trained on other examples than this recipe gives (data, template or tokenizer changed).",
            "Resume with the recipe that the run was started with, or start a new run in another output_dir.",
        ),
        (
            saved.global_batch_size,
            now.global_batch_size,
            f"was trained with a global batch of {saved.global_batch_size} examples; this recipe makes it "
            f"{now.global_batch_size} on {processes}.",
            f"Set train.global_batch_size: {saved.global_batch_size}.",
        ),
        (
            saved.rows,
            now.rows,
            f"was trained on {saved.rows}; this recipe makes {now.rows}.",
            "Set data.packing, data.max_length and train.group_by_length as they were.",
        ),
        (
            saved.optimizer,
            now.optimizer,
            f"holds the states of {saved.optimizer}; this recipe's optimizer is {now.optimizer}.",
            "Set train.optim and its settings as they were.",
        ),
    )


def _about_method(was: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """Return message and hint about the first key of the method section that changed; the type first."""
    if was.get("type") != now["type"]:
        return f"was trained by {was.get('type')}; this recipe's method is {now['type']}.", (
            f"Set method.type: {was.get('type')}."
        )
    name = next((name for name in {**was, **now} if was.get(name) != now.get(name)), "type")
    old, new = (json.dumps(values.get(name)) for values in (was, now))
    return f"was trained with method.{name}: {old}; this recipe has {new}.", f"Set method.{name}: {old}."


def _check_deepspeed_ranks(folder: Path, saved: CheckpointRecord, now: CheckpointRecord) -> None:
    """Raise UserError if a DeepSpeed run resumes with other ranks or another strategy: its engine cannot reshard."""
    wrote, reads = ((one.strategy, one.world_size) for one in (saved, now))
    if wrote != reads and any(strategy.startswith("deepspeed") for strategy, _ in (wrote, reads)):
        raise UserError(
            f"{folder} was written by {plural(wrote[1], 'process', 'processes')} with {wrote[0]}; "
            f"this run has {reads[1]} with {reads[0]}, "
            "and DeepSpeed loads only checkpoints of its own strategy and number of processes.",
            hint="Resume as the run was started; ddp and fsdp resume each other on any number of processes.",
        )


# ---- loading


@contextlib.contextmanager
def explain_unusable(folder: Path) -> Iterator[None]:
    """Raise UserError for files that are those that were written, and yet cannot be loaded."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.distributed.DistError):  # RuntimeErrors that say nothing about the files
        raise
    except (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
            pickle.UnpicklingError, SafetensorError) as problem:  # fmt: skip
        reason = message_of(problem)
        raise UserError(
            f"{folder} cannot be loaded, although its files are those that were written: {reason.rstrip('.')}.",
            hint="Remove it to continue from the checkpoint before it, or name another one in "
            "checkpoint.resume_from_checkpoint.",
        ) from problem


def restore_random_states(folder: Path, rank: int) -> None:
    """Set the random states of Python, numpy and torch to those of a rank. A rank that had none keeps its new ones.

    accelerate's `load_state` does the same, and goes on without a word if it fails.
    """
    path = folder / f"{RNG_STATE_NAME}_{rank}.pkl"
    if not path.is_file():
        return
    try:
        states = load(path)  # by torch's restricted unpickler, which runs no code of the file
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        if torch.cuda.is_available() and "torch_cuda_manual_seed" in states:
            # the states of all devices that the rank saw; here it may see more, or fewer
            saved = states["torch_cuda_manual_seed"]
            device = torch.cuda.current_device()
            if device < len(saved):
                torch.cuda.set_rng_state(saved[device], device)
    except (ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError,
            pickle.UnpicklingError) as problem:  # fmt: skip
        raise ValueError(f"{path.name} does not hold random states ({type(problem).__name__})") from problem


def load_states(accelerator: Accelerator, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer states into what accelerate prepared, however many ranks wrote them.

    Settings of the optimizer's groups, such as weight decay, stay those of the recipe, which may have changed.
    """
    given = [dict(group) for group in unwrap_optimizer(optimizer).param_groups]
    _load_all_states(accelerator, folder, model, optimizer)
    for group, own in zip(unwrap_optimizer(optimizer).param_groups, given, strict=True):
        group.pop("lr_multiplier", None)  # a group whose rate is the run's has none
        keep_settings(group, own)


def _load_all_states(
    accelerator: Accelerator, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    was_sharded = (folder / MODEL_SHARDS).is_dir()
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if not (was_sharded or is_sharded):
        accelerator.load_state(str(folder))
        return
    if was_sharded:
        _load_shards(folder, accelerator.unwrap_model(model), unwrap_optimizer(optimizer), alone=not is_sharded)
    else:
        load_whole_weights(folder, model)
        _shard_optimizer(folder, unwrap_optimizer(optimizer))
    if accelerator.scaler is not None:  # of float16
        accelerator.scaler.load_state_dict(load(folder / SCALER_NAME))


def _load_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
    """Load shards into a model that is sharded, too, or whole. alone: each rank reads all of them by itself."""
    weights = {"model": unfrozen_states(model) | _saved_states(folder, model)}
    _read_shards(weights, folder / MODEL_SHARDS, alone=alone)
    set_model_state_dict(model, weights["model"], options=StateDictOptions(strict=False))
    states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _read_shards(states, folder / OPTIMIZER_SHARDS, alone=alone)
    set_optimizer_state_dict(model, optimizer, states["optimizer"])


def _saved_states(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the model that a checkpoint holds. Those of earlier versions hold the frozen ones, too.

    Weights in 4 bits are not loaded into a whole model: it may hold their bytes in another dtype.
    """
    packed = {name for name, parameter in model.named_parameters() if hasattr(parameter, "quant_state")}
    saved = FileSystemReader(folder / MODEL_SHARDS).read_metadata().state_dict_metadata
    return {
        name: tensor
        for name, tensor in get_model_state_dict(model).items()
        if f"model.{name}" in saved and name not in packed
    }


def _read_shards(into: dict[str, Any], shards: Path, *, alone: bool) -> None:
    with warnings.catch_warnings():  # torch warns that there is one process, which is intended
        warnings.simplefilter("ignore", UserWarning)
        load_shards(into, storage_reader=FileSystemReader(shards), no_dist=alone)


@torch.no_grad()
def load_whole_weights(folder: Path, model: nn.Module) -> None:
    """Load whole weights into a sharded model, one tensor at a time from a mapped file: no rank holds a whole model."""
    parameters = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            # B0 and A0 of PiSSA and OLoRA are no parameters of the model.
            for name in (name for name in tuple(file.keys()) if not name.startswith(PREFIX)):
                parameter = parameters[name]
                local_shard(parameter).copy_(local_shard(_shard_like(file.get_tensor(name), parameter)))


def _shard_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", mmap=True, weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved["state"].items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.ndim == 0:  # step counters: each rank holds them whole
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
