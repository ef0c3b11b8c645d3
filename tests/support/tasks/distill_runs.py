"""Runs of task: distill in this process: tiny students of the bundled stories260K."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from support.command_line import RECIPE, metrics
from support.quickstart_runs import train

TEACHER = RECIPE.parent / "stories260K"


def save_student(folder: Path, *, vocab_size: int | None = None, **changes: object) -> Path:
    """Save a random student with two layers, and the changes of its configuration."""
    config = AutoConfig.from_pretrained(TEACHER)
    for name, value in {"num_hidden_layers": 2, "vocab_size": vocab_size or config.vocab_size, **changes}.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TEACHER).save_pretrained(folder)
    return folder


def distill_settings(student: Path, **changes: object) -> dict[str, object]:
    """Return the settings of a short run: the bundled teacher, a float32 student, and these changes."""
    names = {"task": "distill", "distill.teacher": TEACHER, "model.model_name_or_path": student}
    return {**names, "model.dtype": "float32", "checkpoint.save_model": False, **changes}


def distil(folder: Path, student: Path, **changes: object) -> list[dict]:
    """Train, and return the lines of metrics.jsonl. The run is in `folder / "run"`."""
    train(folder, **distill_settings(student, **changes))
    return metrics(folder / "run")


def values(lines: list[dict], key: str = "loss") -> list[float]:
    """Return the values of a key in order of their steps."""
    return [line[key] for line in lines if key in line]
