"""Preferences and rewards in files of Axolotl (`rl`), LLaMA-Factory (`stage`) and TRL (keys of its configurations)."""

from __future__ import annotations

from typing import Any

from ligertune.recipe.aliases import UNSET, Alias
from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.section import convert_by

# `rl` of Axolotl -> preference.loss_type
RL = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
# `pref_loss` of LLaMA-Factory and `loss_type` of TRL -> the keys of `preference`
LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("sigmoid", "ipo", "hinge", "robust", "simpo", "orpo")},
    "sigmoid_norm": {"loss_type": "sigmoid", "length_normalization": True},
}
# keys that only files of TRL's DPOConfig and KTOConfig have
DPO_SIGNS = ("precompute_ref_log_probs", "ld_alpha", "beta", "sync_ref_model", "desirable_weight", "undesirable_weight")
TRL_RATE = 1e-6  # default of DPOConfig and KTOConfig
REWARD_RATE = 1e-4  # default of RewardConfig
PREFERENCE_ALIASES = (
    Alias("preference.beta", ("rl_beta", "dpo_beta", "pref_beta")),
    Alias("preference.sft_weight", ("rpo_alpha", "pref_ftx")),
    Alias("preference.label_smoothing", ("dpo_label_smoothing",)),
    Alias("preference.length_normalization", ("dpo_norm_loss",)),
    Alias("preference.desirable_weight", ("kto_desirable_weight", "kto_chosen_weight")),
    Alias("preference.undesirable_weight", ("kto_undesirable_weight", "kto_rejected_weight")),
    Alias("preference.reference", ("precompute_ref_log_probs",), convert_by({True: "precompute", False: UNSET})),
)


def convert_preferences(work: Import) -> None:
    """Replace the keys that choose preference optimisation by `task: dpo` and `preference.loss_type`, if it is one.

    A reward model is `task: reward`.
    """
    if _convert_rewards(work):
        return
    data = work.data
    name = next((name for name in ("rl", "stage") if data.get(name)), "loss_type")
    sign = next((sign for sign in (name, *DPO_SIGNS) if sign in data), name)
    found = _loss_of(work)
    if found is None:
        return
    work.put("task", "dpo", sign)
    named = next((loss for loss in ("pref_loss", "loss_type", name) if loss in work.source), sign)
    for key, value in found.items():
        work.put(f"preference.{key}", value, named)
    if found.get("loss_type") == "simpo" and "cpo_alpha" in data:  # CPOConfig's weight of the cross-entropy
        work.put("preference.sft_weight", data.pop("cpo_alpha"), "cpo_alpha")
    if found.get("loss_type") == "orpo":  # TRL and LLaMA-Factory call the weight of the odds ratio beta
        for other in ("beta", "pref_beta"):
            if other in data:
                work.put("preference.orpo_alpha", data.pop(other), other)


def _convert_rewards(work: Import) -> bool:
    """Replace the keys that train a reward model by `task: reward`; return whether there are any."""
    data = work.data
    name = "stage" if data.get("stage") == "rm" else "reward_model"
    if data.get(name) not in ("rm", True):
        name = "center_rewards_coefficient"  # of RewardConfig
        if name not in data:
            return False
        data.setdefault("learning_rate", REWARD_RATE)
    work.put("task", "reward", name)
    for other in ("stage", "reward_model", "num_labels"):
        work.take(other, "task")
    return True


def is_preference_file(data: dict[str, Any]) -> bool:
    """Report whether a file of TRL has keys of DPOConfig or KTOConfig, or names one of their losses."""
    losses = data.get("loss_type")
    named = losses if isinstance(losses, list) else [losses]
    return any(name in data for name in DPO_SIGNS) or any(str(loss) in (*LOSSES, "kto") for loss in named)


def _loss_of(work: Import) -> dict[str, Any] | None:
    """Return the keys of `preference` that choose the loss, and remove the tool's; None for another objective."""
    data = work.data
    if isinstance(data.get("rl"), str) and data["rl"] in RL:
        return {"loss_type": RL[work.take("rl", "task")]}
    if data.get("stage") == "kto":
        work.take("stage", "task")
        return {"loss_type": "kto"}
    if data.get("stage") == "dpo":
        work.take("stage", "task")
        return _named(work.take("pref_loss", "preference.loss_type", default="sigmoid"))
    if "stage" in data or "rl" in work.source or not is_preference_file(data):
        return None
    data.setdefault("learning_rate", TRL_RATE)
    if data.get("loss_type") == "kto" or ("loss_type" not in data and "desirable_weight" in data):
        work.take("loss_type", "preference.loss_type")
        return {"loss_type": "kto"}
    loss = work.take("loss_type", "preference.loss_type", default="sigmoid")
    named = loss if isinstance(loss, list) else [loss]
    has_sft = len(named) == 2 and named[1] == "sft"
    return _named(loss, work.take("loss_weights", "preference.sft_weight") if has_sft else None)


def _named(loss: Any, weights: Any = None) -> dict[str, Any]:
    """Return the keys of a loss. TRL accepts a list, in which sft is the cross-entropy of the chosen answers."""
    names = loss if isinstance(loss, list) else [loss]
    weights = weights if isinstance(weights, list) else [1.0] * len(names)
    if len(names) == len(weights) == 2 and names[1] == "sft" and weights[0] == 1:
        return {**_named(names[0]), "sft_weight": weights[1]}
    # another loss stays as it is: the check of the recipe names the ones that exist
    return LOSSES.get(str(names[0]), {"loss_type": names[0]}) if len(names) == 1 else {"loss_type": loss}
