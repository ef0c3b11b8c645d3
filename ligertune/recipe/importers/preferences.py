"""Preferences and rewards in files of Axolotl (`rl`), LLaMA-Factory (`stage`) and TRL (keys of its configurations)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ligertune.recipe.aliases import UNSET, Alias
from ligertune.recipe.document import Document
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
SAME_REFERENCE = "the reference is the model before training; preference.reference says how it is computed"
REFERENCE_KEYS = dict.fromkeys(
    ("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "sync_ref_model", "ref_model_sync_steps",
     "ref_model_mixup_alpha", "precompute_ref_batch_size", "reference_free", "ref_model_init_kwargs"),
    SAME_REFERENCE,
)  # fmt: skip
PREFERENCE_ALIASES = (
    Alias("preference.beta", ("rl_beta", "dpo_beta", "pref_beta")),
    Alias("preference.sft_weight", ("rpo_alpha", "pref_ftx")),
    Alias("preference.label_smoothing", ("dpo_label_smoothing",)),
    Alias("preference.length_normalization", ("dpo_norm_loss",)),
    Alias("preference.desirable_weight", ("kto_desirable_weight", "kto_chosen_weight")),
    Alias("preference.undesirable_weight", ("kto_undesirable_weight", "kto_rejected_weight")),
    Alias("preference.reference", ("precompute_ref_log_probs",), convert_by({True: "precompute", False: UNSET})),
)


def convert_preferences(document: Document) -> None:
    """Replace the keys that choose preference optimisation by `task: dpo` and `preference.loss_type`, if it is one.

    A reward model is `task: reward`.
    """
    if _convert_rewards(document):
        return
    data, name = document.data, next((name for name in ("rl", "stage") if document.data.get(name)), "loss_type")
    place = document.place((name,))
    found = _loss_of(data)
    if found is None:
        return
    document.put(("task",), "dpo", replace(place, written=name))
    for key, value in found.items():
        document.put(("preference", key), value, place)
    if found.get("loss_type") == "orpo":  # TRL and LLaMA-Factory call the weight of the odds ratio beta
        for other in ("beta", "pref_beta"):
            if other in data:
                document.put(
                    ("preference", "orpo_alpha"), data.pop(other), replace(document.place((other,)), written=other)
                )


def _convert_rewards(document: Document) -> bool:
    """Replace the keys that train a reward model by `task: reward`; return whether there are any."""
    data = document.data
    name = "stage" if data.get("stage") == "rm" else "reward_model"
    if data.get(name) not in ("rm", True):
        name = "center_rewards_coefficient"  # of RewardConfig
        if name not in data:
            return False
        data.setdefault("learning_rate", REWARD_RATE)
    document.put(("task",), "reward", replace(document.place((name,)), written=name))
    for other in ("stage", "reward_model", "num_labels"):
        data.pop(other, None)
    return True


def is_preference_file(data: dict[str, Any]) -> bool:
    """Report whether a file of TRL has keys of DPOConfig or KTOConfig, or names one of their losses."""
    losses = data.get("loss_type")
    named = losses if isinstance(losses, list) else [losses]
    return any(name in data for name in DPO_SIGNS) or any(loss in (*LOSSES, "kto") for loss in named)


def _loss_of(data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the keys of `preference` that choose the loss, and remove the tool's; None for another objective."""
    if data.get("rl") in RL:
        return {"loss_type": RL[data.pop("rl")]}
    if data.get("stage") == "kto":
        del data["stage"]
        return {"loss_type": "kto"}
    if data.get("stage") == "dpo":
        del data["stage"]
        return _named(data.pop("pref_loss", "sigmoid"))
    if "stage" in data or not is_preference_file(data):
        return None
    data.setdefault("learning_rate", TRL_RATE)
    if data.get("loss_type") == "kto" or ("loss_type" not in data and "desirable_weight" in data):
        data.pop("loss_type", None)
        return {"loss_type": "kto"}
    return _named(data.pop("loss_type", "sigmoid"), data.pop("loss_weights", None))


def _named(loss: Any, weights: Any = None) -> dict[str, Any]:
    """Return the keys of a loss. TRL accepts a list, in which sft is the cross-entropy of the chosen answers."""
    names = loss if isinstance(loss, list) else [loss]
    weights = weights if isinstance(weights, list) else [1.0] * len(names)
    if len(names) == len(weights) == 2 and names[1] == "sft" and weights[0] == 1:
        return {**_named(names[0]), "sft_weight": weights[1]}
    # another loss stays as it is: the check of the recipe names the ones that exist
    return LOSSES.get(str(names[0]), {"loss_type": names[0]}) if len(names) == 1 else {"loss_type": loss}
