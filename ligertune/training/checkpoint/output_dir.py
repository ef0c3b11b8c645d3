"""output_dir of a run: its lock, the checks that come before the first file, and the first files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ligertune.files.storage import mask_secrets, write_json, write_text
from ligertune.hardware import is_main_process
from ligertune.launcher.failures import is_started_rank
from ligertune.launcher.run_lock import locked_folder
from ligertune.planning.plan import Plan
from ligertune.planning.preflight import check_output_dir, clear_run
from ligertune.training.checkpoint.checkpoint_files import check_space
from ligertune.training.checkpoint.load_checkpoint import check_unfinished


@contextlib.contextmanager
def output_dir_of(plan: Plan, *, processes: Sequence[int] = ()) -> Iterator[None]:
    """Hold the lock of output_dir for one run, in the process that the user started or in the main rank.

    processes: the ranks that the launcher started. Another run may have used the folder while this one was planned, so
    the checks of plan_for are repeated. Raises UserError.
    """
    if is_started_rank() or not is_main_process():
        yield
        return
    with locked_folder(plan.output_dir, processes=processes):
        check_output_dir(plan.checkpoint)
        check_unfinished(plan)
        yield


def begin_output(plan: Plan) -> None:
    """Check permissions and disk space, and write plan.json and resolved_recipe.yaml. Only the main rank calls it."""
    if plan.checkpoint.overwrite:
        clear_run(plan.output_dir)
    check_space(plan)
    write_json(plan.output_dir / "plan.json", plan.as_dict())
    write_text(plan.output_dir / "resolved_recipe.yaml", mask_secrets(plan.recipe_text))
