"""Objectives of other tools: preferences and rewards are converted; others are refused, and never become another one.

All reasons are found before the file is refused.
"""

from __future__ import annotations

import re
from typing import Any

from ligertune.recipe.complaints import abbreviated
from ligertune.recipe.importers.import_state import Import, is_off
from ligertune.recipe.importers.import_tables import KEEP_THE_TOOL, KEYS, OBJECTIVES, PREFERENCE_SIGNS, TRL, UNSUPPORTED
from ligertune.recipe.importers.key_rules import apply_rules

PREFERENCE_RATE = 1e-6  # default learning rate of DPOConfig and KTOConfig
REWARD_RATE = 1e-4  # default learning rate of RewardConfig
SAME_LOSSES = ("nll", "chunked_nll")  # of SFTConfig: the cross-entropy of each trained token
FOREIGN_PLUGINS = {"diffusion": "diffusion", ".kd.": "kd_trainer"}  # part of a name -> the key with the same meaning


def refuse_other_objectives(work: Import) -> None:
    """Record all reasons to refuse a file that trains for something else, and remove these keys."""
    for name, supported in OBJECTIVES.items():
        value = work.data.get(name)
        if value is not None and value is not False and value not in supported:
            work.refuse(name, f": {_shown_plain(value)} {UNSUPPORTED['no_rewards']}")
            work.take(name)
    for name, value in list(work.data.items()):
        found = _refusal_of(name)
        if found and not is_off(value) and value != 0:
            work.refuse(name, f" {found['sentence']}", found.get("hint", KEEP_THE_TOOL))
            work.take(name)
    plugins = str(work.data.get("plugins")).lower()
    for part, key in FOREIGN_PLUGINS.items():
        if part in plugins:
            found = _refusal_of(key)
            work.refuse("plugins", f": {part.strip('.')} {found['sentence']}", found.get("hint", KEEP_THE_TOOL))
    if work.peer is TRL and "loss_type" in work.data and not _is_preference_file(work.data):
        _refuse_another_loss(work)


def _refusal_of(name: str) -> dict[str, str]:
    return next((row for row in UNSUPPORTED["refused"] if re.fullmatch(row["keys"].replace(" ", "|"), name)), {})


def _refuse_another_loss(work: Import) -> None:
    """Accept `loss_type` of SFTConfig if it is the cross-entropy; other trainers' losses are converted elsewhere."""
    loss = work.take("loss_type", "task")
    if loss not in SAME_LOSSES:
        hint = _refusal_of("label_smoothing_factor")["hint"]
        work.refuse("loss_type", f": {_shown_plain(loss)} is not a loss of ligertune.", hint)


def _shown_plain(value: Any) -> str:
    """Format a value shortly, a name without quotes."""
    return value[:60] if isinstance(value, str) else abbreviated(value)


def convert_objective(work: Import) -> None:
    """Replace the keys that choose preference optimisation or a reward model by `task` and `preference.loss_type`."""
    data = work.data
    reward_key = "stage" if data.get("stage") == "rm" else "reward_model"
    if data.get(reward_key) in ("rm", True) or "center_rewards_coefficient" in data:
        if data.get(reward_key) not in ("rm", True):
            reward_key = "center_rewards_coefficient"  # of RewardConfig
            data.setdefault("learning_rate", REWARD_RATE)
        work.put("task", "reward", reward_key)
        for name in ("stage", "reward_model", "num_labels"):
            work.take(name, "task")
        return
    chosen = next((name for name in ("rl", "stage") if data.get(name)), "loss_type")
    sign = next((name for name in (chosen, *PREFERENCE_SIGNS) if name in data), chosen)
    found = _preference_of(work)
    if found is None:
        return
    work.put("task", "dpo", sign)
    named = next((name for name in ("pref_loss", "loss_type", chosen) if name in work.source), sign)
    for key, value in found.items():
        work.put(f"preference.{key}", value, named)
    apply_rules(work, "loss")


def _is_preference_file(data: dict[str, Any]) -> bool:
    """Report whether a file of TRL has keys of DPOConfig or KTOConfig, or names one of their losses."""
    losses = data.get("loss_type")
    named = losses if isinstance(losses, list) else [losses]
    is_loss = any(str(loss) in KEYS["preference_losses"].split() for loss in named)
    return is_loss or any(name in data for name in PREFERENCE_SIGNS)


def _preference_of(work: Import) -> dict[str, Any] | None:
    """Return the keys of `preference` that choose the loss, and remove the tool's; None for another objective."""
    data = work.data
    if isinstance(data.get("rl"), str) and data["rl"] in OBJECTIVES["rl"]:
        loss = work.take("rl", "task")
        return {"loss_type": "sigmoid" if loss == "dpo" else loss}
    if data.get("stage") in ("dpo", "kto"):
        loss = work.take("stage", "task")
        if loss == "dpo":
            loss = work.take("pref_loss", "preference.loss_type", default="sigmoid")
        return _with_cross_entropy(loss)
    if "stage" in data or "rl" in work.source or not _is_preference_file(data):
        return None
    data.setdefault("learning_rate", PREFERENCE_RATE)
    is_kto = "loss_type" not in data and "desirable_weight" in data
    loss = work.take("loss_type", "preference.loss_type", default="kto" if is_kto else "sigmoid")
    has_weights = isinstance(loss, list) and len(loss) == 2 and loss[1] == "sft"
    return _with_cross_entropy(loss, work.take("loss_weights", "preference.sft_weight") if has_weights else None)


def _with_cross_entropy(loss: Any, weights: Any = None) -> dict[str, Any]:
    """Return the keys of a loss. TRL accepts a list, in which sft is the cross-entropy of the chosen answers."""
    names = loss if isinstance(loss, list) else [loss]
    weights = weights if isinstance(weights, list) else [1.0] * len(names)
    if len(names) == len(weights) == 2 and names[1] == "sft" and weights[0] == 1:
        return {**_with_cross_entropy(names[0]), "sft_weight": weights[1]}
    if names == ["sigmoid_norm"]:
        return {"loss_type": "sigmoid", "length_normalization": True}
    # another loss stays as it is: the check of the recipe names the ones that exist
    return {"loss_type": names[0] if len(names) == 1 else loss}
