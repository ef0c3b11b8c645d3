"""Where a run's numbers go beside metrics.jsonl: accelerate's trackers, torch's profiler, a snapshot of GPU memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

if TYPE_CHECKING:
    from ligertune.planning.plan import Plan

FOLDER = "profile"


def tracker_names(plan: Plan) -> list[str]:
    """The trackers that accelerate is to open; metrics.jsonl is ours."""
    return [name for name in plan.logging.report_to if name != "jsonl"]


def run_name(plan: Plan) -> str:
    """The recipe's, or the name of output_dir."""
    return plan.logging.run_name or plan.output_dir.resolve().name


def open_trackers(plan: Plan, accelerator: Accelerator) -> None:
    """Begin a run of this name in each tracker, with the recipe as its settings."""
    if not tracker_names(plan):
        return
    name, settings = run_name(plan), _flat(plan.settings)
    accelerator.init_trackers(name, config=settings, init_kwargs={"wandb": {"name": name}})


def track(accelerator: Accelerator, line: dict) -> None:
    """Send the numbers of a line of metrics.jsonl to every tracker."""
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
    accelerator.log(numbers, step=line["step"])


def _flat(tree: dict, above: str = "") -> dict[str, str | int | float | bool]:
    """{"a": {"b": 1}} -> {"a.b": 1}; what no tracker takes becomes a string."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{above}{key}.")
        else:
            found[above + key] = value if isinstance(value, str | int | float) else str(value)
    return found


@contextlib.contextmanager
def profiled(plan: Plan, accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """Gives what is to be called after each step. The trace, for chrome://tracing or Perfetto, is of the main process.

    A memory snapshot is of the steps after the warm-up, too; a CPU has none.
    """
    wanted, folder = plan.measurement, plan.output_dir / FOLDER
    snapshot = wanted.memory_snapshot and accelerator.device.type == "cuda"
    if not accelerator.is_main_process or not (wanted.profile_steps or snapshot):
        yield lambda: None
        return
    folder.mkdir(exist_ok=True)
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    with contextlib.ExitStack() as stack:
        step = _profiler(plan, stack, folder / "trace.json") if wanted.profile_steps else lambda: None
        try:
            yield step
        finally:
            if snapshot:
                torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)


def _profiler(plan: Plan, stack: contextlib.ExitStack, path: Any) -> Callable[[], None]:
    skipped, active = plan.measurement.warmup_steps, plan.measurement.profile_steps
    schedule = torch.profiler.schedule(skip_first=skipped, wait=0, warmup=1, active=active, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=lambda made: made.export_chrome_trace(str(path))
    )
    return stack.enter_context(profiler).step
