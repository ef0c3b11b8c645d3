"""What the evaluations of a run came to: the best one, whose weights are kept, and when there is no hope of another.

All of it follows from the losses in metrics.jsonl, so a resumed run knows what the run before it knew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from ligertune.folders import put_in_place, remove
from ligertune.train.checkpoint.trained_weights import FILE, load_trained, save_trained
from ligertune.train.distributed import full_state_dict, is_sharded

if TYPE_CHECKING:
    from torch import Tensor, nn


class Evaluations:
    """Losses in their order. A lower one is a better model."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.best, self.since_best = math.inf, 0
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> bool:
        """Note a loss; whether it is the lowest so far."""
        if loss < self.best:
            self.best, self.since_best = loss, 0
            return True
        self.since_best += 1
        return False

    def hopeless(self, patience: int | None) -> bool:
        """Whether so many evaluations in a row were not better than the best one."""
        return patience is not None and self.since_best >= patience


def keep_best(accelerator: Accelerator, model: nn.Module, output_dir: Path, *, step: int, loss: float) -> None:
    """Write the weights that train to `output_dir/best`, complete or as it was. All ranks call it."""
    folder, aside = output_dir / "best", output_dir / ".best.partial"
    weights = full_state_dict(accelerator, model)
    if accelerator.is_main_process:
        remove(aside)
        aside.mkdir(parents=True)
        if weights is None:
            save_trained(accelerator.unwrap_model(model), aside / FILE)
        else:
            # tied weights once: they may be one piece of memory, which safetensors refuses under two names
            once = {t.data_ptr(): name for name, t in reversed(weights.items())}
            save_file({name: weights[name].contiguous() for name in once.values()}, aside / FILE)
        (aside / "best.json").write_text(json.dumps({"step": step, "eval_loss": loss}) + "\n", encoding="utf-8")
        put_in_place(aside, folder)
    accelerator.wait_for_everyone()


def take_best(accelerator: Accelerator, model: nn.Module, output_dir: Path) -> tuple[int, dict[str, Tensor] | None]:
    """(the step it is of, its weights where the model is sharded); else the model has them now."""
    folder = output_dir / "best"
    step = json.loads((folder / "best.json").read_text(encoding="utf-8"))["step"]
    if is_sharded(accelerator):
        return step, load_file(folder / FILE)
    load_trained(accelerator.unwrap_model(model), folder / FILE)
    return step, None
