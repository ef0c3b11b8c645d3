"""Checkpoints: complete or absent. Written aside, then renamed; weights, optimizer, RNG and the step.

`output_dir/checkpoints/step-N/` holds what accelerate's `save_state` writes (weights as safetensors, or sharded under
FSDP) and `progress.json`, with a checksum of each of these files. The data position is the step itself (see `order`),
and so is the learning rate. A checkpoint that is not what was written is not resumed from; the one before it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError

from ligertune.errors import UserError
from ligertune.planning.plan import Plan
from ligertune.storage import (
    PROGRESS_FILE,
    complete_checkpoints,
    newest_checkpoint,
    put_in_place,
    remove,
    remove_leftovers,
    writing,
)
from ligertune.train.checkpoint.checksums import checksums, damage

NAME = re.compile(r"step-(\d+)")


@writing("A checkpoint")
def save_checkpoint(accelerator: Accelerator, plan: Plan, step: int) -> Path:
    """Write `step-N` and drop the oldest beyond `save_total_limit`. Called by all ranks."""
    aside = begin(accelerator, plan, step)
    with unwritten(plan, step, aside):
        accelerator.save_state(str(aside))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            complete(plan, step, aside)
    accelerator.wait_for_everyone()
    return _final(aside, step)


def begin(accelerator: Accelerator, plan: Plan, step: int) -> Path:
    """An empty folder aside, into which all ranks may write."""
    aside = plan.output_dir / "checkpoints" / f".step-{step}.partial"
    with unwritten(plan, step, aside):
        if accelerator.is_main_process:
            remove(aside)  # left by a kill in the middle of a save
            aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    return aside


def complete(plan: Plan, step: int, aside: Path) -> None:
    """Give a folder with all states its last file and its name, and drop the oldest. On the main process."""
    _complete_with(aside, progress_of(plan, step))
    put_in_place(aside, _final(aside, step))
    _drop_oldest(aside.parent, keep=plan.checkpoint.save_total_limit)


def _final(aside: Path, step: int) -> Path:
    return aside.with_name(f"step-{step}")


@contextlib.contextmanager
def unwritten(plan: Plan, step: int, aside: Path) -> Iterator[None]:
    """Turns what the disk refuses into a UserError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own for it
        raise _unwritten(plan, step, aside, error) from error


def progress_of(plan: Plan, step: int) -> dict:
    """What a resumed run compares itself with."""
    return {
        "step": step,
        "data_fingerprint": plan.data.fingerprint,
        "method": plan.build.method.type,
        "plan": plan.as_dict(),
    }


def _complete_with(aside: Path, progress: dict) -> None:
    """The last file, which makes a checkpoint complete."""
    progress["files"] = checksums(aside, but=PROGRESS_FILE)
    (aside / PROGRESS_FILE).write_text(json.dumps(progress, indent=1, default=str), encoding="utf-8")


def _unwritten(plan: Plan, step: int, aside: Path, error: Exception) -> UserError:
    """What to say of a save that failed in the middle of a run: a full disk, a quota, a folder that was taken away."""
    shutil.rmtree(aside, ignore_errors=True)
    newest = newest_checkpoint(plan.output_dir)
    left = f"The newest complete one is {newest}." if newest else "There is no earlier one."
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return UserError(
        f"The checkpoint of step {step} could not be written to {plan.output_dir} ({reason}). {left}",
        hint="Make room or mend the folder, and go on with --resume.",
        exit_code=1,
    )


def resume_folder(plan: Plan) -> tuple[Path | None, tuple[str, ...]]:
    """What `checkpoint.resume_from_checkpoint` means here: a folder, or None to start at step 0; and notes on the way.

    auto takes the newest checkpoint that is what was written.
    """
    wanted, notes = plan.checkpoint.resume_from_checkpoint, []
    if wanted == "never":
        return None, ()
    if wanted == "auto":
        for folder in reversed(complete_checkpoints(plan.output_dir)):
            fault = _fault(folder)
            if fault is None:
                return folder, tuple(notes)
            notes.append(f"{folder} is damaged and left alone: {fault}")
        return None, tuple(notes)
    folder = Path(wanted)
    if not (folder / PROGRESS_FILE).is_file():
        raise UserError(
            f"checkpoint.resume_from_checkpoint: {wanted} is not a complete checkpoint (it has no {PROGRESS_FILE}).",
            hint="Name a checkpoints/step-N folder of a run, or write auto for the newest one.",
        )
    fault = _fault(folder)
    if fault is not None:
        raise UserError(
            f"checkpoint.resume_from_checkpoint: {wanted} is damaged: {fault}.",
            hint="Write auto, which takes the newest checkpoint that is sound.",
        )
    return folder, ()


def _fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. One from before there were checksums is taken as it is."""
    try:
        progress = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{PROGRESS_FILE} cannot be read ({error})"
    return damage(folder, progress.get("files", {}), but=PROGRESS_FILE)


def check_unfinished(plan: Plan) -> None:
    """Resuming a run that is done would train nothing, or start it over; a UserError says so."""
    path = plan.output_dir / "report.json"
    if plan.checkpoint.resume_from_checkpoint == "never" or not path.is_file():
        return
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["model_path"] is not None and not Path(report["model_path"]).is_dir():
        return  # somebody removed it: the last steps are done again, and it is written again
    if report["status"] == "completed" and report["steps"] >= plan.schedule.total_steps:
        raise UserError(
            f"checkpoint.output_dir: the run in {plan.output_dir} is finished ({report['steps']} steps).",
            hint=f"Its model is in {plan.output_dir / 'model'}. To train on, raise train.num_train_epochs; "
            "to start over, use --overwrite.",
        )


def saved_progress(folder: Path, plan: Plan) -> int:
    """The step that a checkpoint was taken after; a UserError where it belongs to another run."""
    progress = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    saved = progress["plan"]["batching"]["global_batch_size"]
    if progress["data_fingerprint"] != plan.data.fingerprint:
        raise UserError(
            f"{folder} was trained on other examples than this recipe gives (data, template or tokenizer changed).",
            hint="Resume with the recipe that the run was started with, or start a new run in another output_dir.",
        )
    if saved != plan.batching.global_batch_size:
        raise UserError(
            f"{folder} was trained with a global batch of {saved} examples; this recipe makes it "
            f"{plan.batching.global_batch_size} on {plan.batching.world_size} processes.",
            hint=f"Set train.global_batch_size: {saved}.",
        )
    rows = _rows(progress["plan"]["rows"])
    if rows != _rows(dataclasses.asdict(plan.rows)):
        raise UserError(
            f"{folder} was trained on {rows}; this recipe makes {_rows(dataclasses.asdict(plan.rows))}.",
            hint="Set data.packing, data.max_length and train.group_by_length as they were.",
        )
    method = progress.get("method", "full")
    if method != plan.build.method.type:
        raise UserError(
            f"{folder} was trained by {method}; this recipe's method is {plan.build.method.type}.",
            hint=f"Set method.type: {method}.",
        )
    kept, keeps = (_states(o) for o in (progress["plan"]["optimizer"], dataclasses.asdict(plan.optimizer)))
    if kept != keeps:
        raise UserError(
            f"{folder} holds the states of {kept}; this recipe's optimizer is {keeps}.",
            hint="Set train.optim and its numbers as they were.",
        )
    _check_ranks(folder, progress["plan"], plan)
    if progress["step"] > plan.schedule.total_steps:
        raise UserError(
            f"{folder} is at step {progress['step']}, past this recipe's {plan.schedule.total_steps} steps.",
            hint="Raise train.num_train_epochs or train.max_steps.",
        )
    return progress["step"]


def _check_ranks(folder: Path, saved: dict, plan: Plan) -> None:
    """A UserError where DeepSpeed is on either side and the ranks are others: its engine reads its own files only."""
    wrote, reads = ((saved["strategy"], saved["batching"]["world_size"]), (plan.strategy, plan.batching.world_size))
    if wrote != reads and any(strategy.startswith("deepspeed") for strategy, _ in (wrote, reads)):
        raise UserError(
            f"{folder} was written by {wrote[1]} processes with {wrote[0]}; this run has {reads[1]} with {reads[0]}, "
            "and DeepSpeed reads what as many of its kind wrote.",
            hint="Resume as the run was started; ddp and fsdp resume each other on any number of processes.",
        )


def _rows(rows: dict) -> str:
    """What decides which examples are in a step, in words."""
    return f"{rows['count']} {rows['kind']} rows of at most {rows['length']} tokens"


def _states(optimizer: dict) -> str:
    """What decides the shapes of an optimizer's states, in words."""
    rank = f" at train.galore.rank: {optimizer['galore']['rank']}" if optimizer["name"] == "galore_adamw" else ""
    return f"{optimizer['name']}{rank}"


def check_space(plan: Plan) -> None:
    """The first save, rehearsed: permissions, and disk for the model, the checkpoints kept and one being written."""
    folder = plan.output_dir / "checkpoints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, plan.output_dir):
            remove_leftovers(place)
        probe = folder / ".rehearsal"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"checkpoint.output_dir: {plan.output_dir} cannot be written to ({error.strerror}).",
            hint="Name a folder that this user may write to.",
        ) from error
    saves = plan.checkpoint.save_strategy != "no"
    copies = plan.checkpoint.save_total_limit + 1 if saves else int(plan.checkpoint.save_on_signal)
    weights = plan.bytes.model * (plan.shards if plan.shares_weights else 1)
    checkpoint = weights + plan.bytes.saved_states * plan.shards
    needed = copies * checkpoint + weights * plan.checkpoint.save_model
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"checkpoint.output_dir: {plan.output_dir} has {free / 1e9:.1f} GB free, and this run's saves need "
            f"{needed / 1e9:.1f} GB ({copies} x {checkpoint / 1e9:.1f} GB, and the model).",
            hint="Lower checkpoint.save_total_limit, or name a folder on a larger disk.",
        )


def _drop_oldest(folder: Path, *, keep: int) -> None:
    for old in complete_checkpoints(folder.parent)[:-keep]:
        remove(old)
