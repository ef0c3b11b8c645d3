"""Choose the checkpoint to resume from: the newest whose files, and the evaluations it depends on, are undamaged.

With early stopping or `load_best_model_at_end`, a resumed run decides by the evaluations in metrics.jsonl, and ends
with the weights in `best/`. Where these are damaged, a checkpoint from before the damage is taken: the steps after it
make them again.
"""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ligertune.errors import UserError, plural
from ligertune.files.storage import (
    PROGRESS_FILE,
    checkpoint_to_resume,
    damaged_lines,
    newest_checkpoint,
    read_metrics,
    step_folders,
)
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.plan import Plan
from ligertune.planning.preflight import no_checkpoint
from ligertune.recipe.read import load_recipe
from ligertune.recipe.schema import Recipe
from ligertune.training.checkpoint.checkpoint_record import damage_of
from ligertune.training.checkpoint.load_checkpoint import saved_progress
from ligertune.training.checkpoint.weight_files import damage_of_best


def continued_recipe(recipe: Recipe) -> Recipe | None:
    """Return the resolved recipe of the run whose checkpoint `recipe` continues from, or None."""
    checkpoint = recipe.checkpoint
    wanted = checkpoint.resume_from_checkpoint
    found = None if wanted == "never" else checkpoint_to_resume(Path(checkpoint.output_dir), wanted)
    if found is None:
        return None
    run = found[0].absolute().parent.parent
    try:
        return load_recipe(run / "resolved_recipe.yaml")
    except UserError:  # it was removed, or an earlier version wrote it
        return None


def agree_on_checkpoint(accelerator: Accelerator, plan: Plan) -> tuple[Path | None, int, tuple[str, ...]]:
    """Return the checkpoint to resume from, its step and notes, as the main rank finds them. All ranks call it.

    Raises UserError if it belongs to another run.
    """
    found = [resume_folder(plan) if accelerator.is_main_process else None]
    folder, notes = broadcast_object_list(found)[0]
    if folder is None:
        return None, 0, notes
    step = saved_progress(folder, plan)
    if notes and folder != newest_checkpoint(plan.output_dir):
        notes += (f"continued from step {step} ({folder}) instead",)
    return folder, step, notes


def resume_folder(plan: Plan) -> tuple[Path | None, tuple[str, ...]]:
    """Return the checkpoint that `checkpoint.resume_from_checkpoint` names, or None to start at step 0; and notes.

    `auto` and `newest` take the newest undamaged checkpoint, and a note names each damaged one. Raises UserError if
    no checkpoint is undamaged, or if one that the recipe names is damaged.
    """
    wanted = plan.checkpoint.resume_from_checkpoint
    if wanted == "never":
        return None, ()
    if wanted not in ("auto", "newest"):
        return _named_folder(wanted), _about_lines(plan)
    folders = step_folders(plan.output_dir)
    limits = _limits(plan)
    notes: list[str] = []
    for step, folder in reversed(folders):
        why = next((f"cannot be continued from: {why}" for last, why in limits if step > last), None)
        if why is None:
            damage = damage_of(folder)
            if damage is None:
                return folder, (*notes, *_about_lines(plan))
            why = f"is damaged and left alone: {damage}"
        notes.append(f"{folder} {why}")
    if folders:
        raise UserError(
            f"checkpoint.resume_from_checkpoint: {plan.output_dir} holds no undamaged checkpoint. "
            + " ".join(f"{note}." for note in notes),
            hint="Restore one of them from a backup, or start over with --overwrite.",
        )
    if wanted == "newest":
        raise no_checkpoint(plan.output_dir)
    return None, ()


def _named_folder(wanted: str) -> Path:
    folder = Path(wanted)
    if not (folder / PROGRESS_FILE).is_file():
        raise UserError(
            f"checkpoint.resume_from_checkpoint: {wanted} is not a complete checkpoint (it has no {PROGRESS_FILE}).",
            hint="Name a checkpoints/step-N folder of a run, or write auto for the newest one.",
        )
    damage = damage_of(folder)
    if damage is not None:
        raise UserError(
            f"checkpoint.resume_from_checkpoint: {wanted} is damaged: {damage}.",
            hint="Write auto, which takes the newest undamaged checkpoint.",
        )
    return folder


def _limits(plan: Plan) -> list[tuple[int, str]]:
    """Return (last step that a checkpoint may have, why) for damaged evaluations or best weights that decide."""
    keeps_best = plan.checkpoint.load_best_model_at_end
    found = []
    if not (keeps_best or plan.evaluation.early_stopping_patience or plan.schedule.follows_evaluations):
        return []
    path = plan.output_dir / "metrics.jsonl"
    damaged = damaged_lines(path)
    if damaged:
        number, last = damaged[0]
        found.append((last, f"line {number} of {path}, which may be an evaluation, is damaged"))
    # without the evaluation before training, which is never the best
    lines = [line for line in read_metrics(path) if "eval_loss" in line and line["step"]]
    if keeps_best and lines:
        damage = damage_of_best(plan.output_dir)
        if damage is not None:
            best = min(lines, key=feature_of(plan.build.task).judged)
            # one less than the best step: a run that is resumed at that step does not evaluate it again
            found.append((best["step"] - 1, f"the best weights, which it needs, are damaged ({damage})"))
    return found


def _about_lines(plan: Plan) -> tuple[str, ...]:
    """Return a note if lines of metrics.jsonl are damaged."""
    path = plan.output_dir / "metrics.jsonl"
    numbers = [number for number, _ in damaged_lines(path)]
    if not numbers:
        return ()
    which = f"{'line' if len(numbers) == 1 else 'lines'} {', '.join(map(str, numbers[:10]))}"
    return (f"{path} has {plural(len(numbers), 'damaged line')}, whose numbers are lost ({which})",)
