"""Objectives and methods that a recipe does not have: such files are refused, and never become another training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ligertune.recipe.importers.import_state import NOTHING, Import
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
# Keys whose presence alone means another objective or method -> the end of the sentence about it
OTHER_TRAINING: dict[str, str] = {
    **dict.fromkeys(
        ("reward_funcs", "reward_model_path", "reward_model_type", "reward_weights", "num_generations", "ppo_epochs"),
        f"is part of reinforcement learning, which {_REWARDS}",
    ),
    "diffusion": "trains a diffusion language model, which ligertune does not have.",
    "qat": "is quantisation-aware training, which ligertune does not have.",
    "quantization_aware_training": "is quantisation-aware training, which ligertune does not have.",
    "process_reward_model": _OTHER_MODEL,
    "kd_trainer": "distils from stored log-probabilities of another format; write a recipe with task: distill.",
    "teacher_model_name_or_path": "distils on the student's own answers; write a recipe with task: distill.",
    **dict.fromkeys(
        ("relora", "relora_steps", "lisa_n_layers", "lisa_step_interval", "use_badam", "use_llama_pro",
         "use_mca", "mixture_of_depths", "num_virtual_tokens", "lora_parameter_freezing", "use_adam_mini",
         "shift_attn", "use_kt"), _OTHER_METHOD,
    ),
    "label_smoothing_factor": "changes the loss in a way that ligertune does not have.",
}  # fmt: skip
_OTHER_LOSS = re.compile(r"use_\w+_loss")  # use_dft_loss, use_asft_loss
_SAME_LOSSES = ("nll", "chunked_nll")  # of SFTConfig: the cross-entropy of each trained token


def refuse_other_objectives(work: Import) -> None:
    """Raise UserError for a file that trains for something else, which must not become supervised fine-tuning."""
    for name, supported in OBJECTIVES.items():
        value = work.data.get(name)
        if value not in (None, False, *supported):
            raise work.refusal(name, f": {value} {_REWARDS}")
    for name, value in work.data.items():
        why = OTHER_TRAINING.get(name) or (_OTHER_METHOD if _OTHER_LOSS.fullmatch(name) else None)
        if why and value not in (*NOTHING, 0):
            raise work.refusal(name, f" {why}")
    plugins = work.data.get("plugins") or ()
    named = " ".join(map(str, plugins if isinstance(plugins, list | tuple) else [plugins])).lower()
    for part, sentence in (("diffusion", OTHER_TRAINING["diffusion"]), (".kd.", OTHER_TRAINING["kd_trainer"])):
        if part in named:
            raise work.refusal("plugins", f": {part.strip('.')} {sentence}")
    _refuse_another_loss(work)


def _refuse_another_loss(work: Import) -> None:
    """Accept `loss_type` of SFTConfig if it is the cross-entropy; other trainers' losses are converted elsewhere."""
    loss = work.data.get("loss_type")
    if work.peer is not TRL or is_preference_file(work.data) or loss is None:
        return
    if loss not in _SAME_LOSSES:
        raise work.refusal("loss_type", f": {loss} is not a loss of ligertune.")
    del work.data["loss_type"]


def nested(section: Any) -> Mapping[str, Any]:
    """Return a section of another tool's file; one with another type counts as empty."""
    return section if isinstance(section, Mapping) else {}
