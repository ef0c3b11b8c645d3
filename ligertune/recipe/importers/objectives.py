"""Objectives and methods that a recipe does not have: such files are refused, and never become another training.

All reasons are found before the file is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligertune.recipe.complaints import abbreviated
from ligertune.recipe.importers.import_state import KEEP_THE_TOOL, Import, is_off
from ligertune.recipe.importers.peers import TRL
from ligertune.recipe.importers.preferences import is_preference_file

# Keys that choose what is trained for, and the values that have a counterpart. `rl` is Axolotl's.
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "stage": ("sft", "pt", "dpo", "kto", "rm"),
    "rl": ("dpo", "ipo", "orpo", "kto", "simpo"),
}
_REWARDS = "is not supported: ligertune trains on texts, answers and preferences, not on rewards of generated answers."
_OTHER_MODEL = "trains another kind of model, which ligertune does not have."
_OTHER_METHOD = "is a method that ligertune does not have."
_DISTILL = "Write a recipe with task: distill."
_WITHOUT = "Remove it to import the rest: the run then trains with the plain cross-entropy."


@dataclass(frozen=True)
class ForeignObjective:
    """Why a key is refused: the end of the sentence about it, and what to do."""

    sentence: str
    hint: str = KEEP_THE_TOOL


# Keys whose presence alone means another objective or method
OTHER_TRAINING: dict[str, ForeignObjective] = {
    **dict.fromkeys(
        ("reward_funcs", "reward_model_path", "reward_model_type", "reward_weights", "num_generations", "ppo_epochs"),
        ForeignObjective(f"is part of reinforcement learning, which {_REWARDS}"),
    ),
    "diffusion": ForeignObjective("trains a diffusion language model, which ligertune does not have."),
    "qat": ForeignObjective("is quantisation-aware training, which ligertune does not have."),
    "quantization_aware_training": ForeignObjective("is quantisation-aware training, which ligertune does not have."),
    "process_reward_model": ForeignObjective(_OTHER_MODEL),
    "kd_trainer": ForeignObjective("distils from stored log-probabilities of another format.", _DISTILL),
    "teacher_model_name_or_path": ForeignObjective("distils on the student's own answers.", _DISTILL),
    **dict.fromkeys(
        ("relora", "relora_steps", "lisa_n_layers", "lisa_step_interval", "use_badam", "use_llama_pro",
         "use_mca", "mixture_of_depths", "num_virtual_tokens", "lora_parameter_freezing", "use_adam_mini", "use_kt"),
        ForeignObjective(_OTHER_METHOD),
    ),
    "shift_attn": ForeignObjective(
        _OTHER_METHOD, "Remove it to import the rest: the run then trains with full attention."
    ),
    "label_smoothing_factor": ForeignObjective(
        "smooths the labels of the loss, and a recipe has no key for it.", _WITHOUT
    ),
}  # fmt: skip
_OTHER_LOSS = re.compile(r"use_\w+_loss")  # use_dft_loss, use_asft_loss
_SAME_LOSSES = ("nll", "chunked_nll")  # of SFTConfig: the cross-entropy of each trained token


def refuse_other_objectives(work: Import) -> None:
    """Record all reasons to refuse a file that trains for something else, and remove these keys."""
    for name, supported in OBJECTIVES.items():
        value = work.data.get(name)
        if value is not None and value is not False and value not in supported:
            work.refuse(name, f": {shown_plain(value)} {_REWARDS}")
            work.take(name)
    for name, value in list(work.data.items()):
        found = OTHER_TRAINING.get(name)
        if found is None and _OTHER_LOSS.fullmatch(name):
            found = ForeignObjective(_OTHER_METHOD, _WITHOUT)
        if found is not None and not is_off(value) and value != 0:
            work.refuse(name, f" {found.sentence}", found.hint)
            work.take(name)
    plugins = work.data.get("plugins") or ()
    named = " ".join(map(str, plugins if isinstance(plugins, list) else [plugins])).lower()
    for part, key in (("diffusion", "diffusion"), (".kd.", "kd_trainer")):
        if part in named:
            work.refuse("plugins", f": {part.strip('.')} {OTHER_TRAINING[key].sentence}", OTHER_TRAINING[key].hint)
    _refuse_another_loss(work)


def _refuse_another_loss(work: Import) -> None:
    """Accept `loss_type` of SFTConfig if it is the cross-entropy; other trainers' losses are converted elsewhere."""
    loss = work.data.get("loss_type")
    if work.peer is not TRL or is_preference_file(work.data) or loss is None:
        return
    if loss not in _SAME_LOSSES:
        work.refuse("loss_type", f": {shown_plain(loss)} is not a loss of ligertune.", _WITHOUT)
    work.take("loss_type", "task")


def shown_plain(value: Any) -> str:
    """Format a value shortly, a name without quotes."""
    return value[:60] if isinstance(value, str) else abbreviated(value)


def nested(section: Any) -> Mapping[str, Any]:
    """Return a section of another tool's file; one with another type counts as empty."""
    return section if isinstance(section, Mapping) else {}
