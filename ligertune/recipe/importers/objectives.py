"""Objectives of other tools: preferences and rewards are converted; others are refused, and never become another one.

All reasons are found before the file is refused.
"""

from __future__ import annotations

import re
from typing import Any

from ligertune.recipe.complaints import abbreviated
from ligertune.recipe.importers import import_tables as tables
from ligertune.recipe.importers.import_state import Import, is_off
from ligertune.recipe.importers.key_rules import apply_rules

PREFERENCE_RATE = 1e-6  # default learning rate of DPOConfig and KTOConfig
SAME_LOSSES = ("nll", "chunked_nll")  # of SFTConfig: the cross-entropy of each trained token
FOREIGN_PLUGINS = {"diffusion": "diffusion", ".kd.": "kd_trainer"}  # part of a name -> the key with the same meaning
PREFERENCE_SIGNS = tables.KEYS["preference_signs"].split()
PREFERENCE_LOSSES = tables.KEYS["preference_losses"].split()


def convert_objective(work: Import) -> None:
    """Replace the keys that choose the objective by `task` and `preference.loss_type`, or record why that fails."""
    _refuse_other_objectives(work)
    is_preference_file = _is_preference_file(work.data)
    # SFTConfig and RewardConfig have a loss_type, too
    if work.peer is tables.TRL and "loss_type" in work.data and not is_preference_file:
        loss = work.take("loss_type", "task")
        if loss not in SAME_LOSSES:
            hint = _refusal_of("label_smoothing_factor")["hint"]
            work.refuse("loss_type", f": {_shown_plain(loss)} is not a loss of ligertune.", hint)
    apply_rules(work, "objective")
    is_chosen = work.data.get("task") != work.source.get("task")  # by a rule
    if is_preference_file and not is_chosen and "stage" not in work.data and "rl" not in work.source:
        _convert_preferences(work)
    apply_rules(work, "loss")


def _refuse_other_objectives(work: Import) -> None:
    """Record all reasons to refuse a file that trains for something else, and remove these keys."""
    for name, supported in tables.UNSUPPORTED["objectives"].items():
        value = work.data.get(name)
        if value is not None and value is not False and value not in supported.split():
            work.refuse(name, f": {_shown_plain(value)} {tables.UNSUPPORTED['no_rewards']}")
            work.take(name)
    for name, value in list(work.data.items()):
        # a key that is off or 0 chooses nothing
        if _refusal_of(name) and not is_off(value) and value != 0:
            _refuse(work, name, " ", name)
            work.take(name)
    for part, key in FOREIGN_PLUGINS.items():
        if part in str(work.data.get("plugins")).lower():
            _refuse(work, "plugins", f": {part.strip('.')} ", key)


def _refuse(work: Import, name: str, start: str, key: str) -> None:
    row = _refusal_of(key)
    work.refuse(name, start + row["sentence"], row.get("hint", tables.KEEP_THE_TOOL))


def _refusal_of(name: str) -> dict[str, str]:
    rows = tables.UNSUPPORTED["refused"]
    return next((row for row in rows if re.fullmatch(row["keys"].replace(" ", "|"), name)), {})


def _shown_plain(value: Any) -> str:
    """Format a value shortly, a name without quotes."""
    return value[:60] if isinstance(value, str) else abbreviated(value)


def _is_preference_file(data: dict[str, Any]) -> bool:
    """Report whether a file of TRL has keys of DPOConfig or KTOConfig, or names one of their losses."""
    losses = data.get("loss_type")
    named = losses if isinstance(losses, list) else [losses]
    return any(name in data for name in PREFERENCE_SIGNS) or any(str(loss) in PREFERENCE_LOSSES for loss in named)


def _convert_preferences(work: Import) -> None:
    """Convert the loss of DPOConfig or KTOConfig. In a list of two, sft is the cross-entropy of the chosen answers."""
    data = work.data
    data.setdefault("learning_rate", PREFERENCE_RATE)
    # the report names the key that says so: the loss, or else a key of these trainers alone
    sign = next(name for name in ("loss_type", *PREFERENCE_SIGNS) if name in data)
    named = next((name for name in ("pref_loss", "loss_type") if name in work.source), sign)
    is_kto = "loss_type" not in data and "desirable_weight" in data
    loss = work.take("loss_type", "preference.loss_type", default="kto" if is_kto else "sigmoid")
    work.put("task", "dpo", sign)
    if isinstance(loss, list) and len(loss) == 1:
        loss = loss[0]
    sft_weight = None
    if isinstance(loss, list) and loss[1:] == ["sft"]:
        weights = work.take("loss_weights", "preference.sft_weight")
        weights = weights if isinstance(weights, list) else [1.0, 1.0]
        # a recipe weighs the cross-entropy alone
        if len(weights) == 2 and weights[0] == 1:
            loss = loss[0]
            sft_weight = weights[1]
    # another loss stays as it is: the check of the recipe names the ones that exist
    found = {"loss_type": loss, "sft_weight": sft_weight}
    if loss == "sigmoid_norm":
        found = {"loss_type": "sigmoid", "length_normalization": True, "sft_weight": sft_weight}
    for key, value in found.items():
        if value is not None:
            work.put(f"preference.{key}", value, named)
