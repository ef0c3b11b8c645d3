"""Measures of `ligertune eval` on pairs and on labelled answers: rewards relative to the base model, and the loss.

The base model, which training began with, is the reference. Rewards and losses are those of training, with TRL's
names. log_probs/accuracies is the share of pairs whose chosen answer is the more probable one; it reads no reference,
so it also measures the base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligertune.errors import UserError
from ligertune.features.example_scores import ExampleMeasures, Measured, Metrics, ScoredExamples, mean_of
from ligertune.features.preference.preference_losses import (
    CHOSEN,
    PAIR_LOSSES,
    REJECTED,
    PairLogProbs,
    pair_losses,
    sft_weight_of,
)
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.planning.options import BuildOptions


def _reads_base(options: BuildOptions) -> bool:
    """Return whether the loss has a reference. Raises UserError for weights of tokens, which are not evaluated."""
    spec = options.section(PreferenceSpec)
    if spec.ld_alpha is not None:
        raise UserError("preference.ld_alpha: an evaluation does not weight the tokens of answers, as this run does.")
    return spec.loss_type == "kto" or PAIR_LOSSES[spec.loss_type].uses_reference


def _pair_numbers(
    spec: PreferenceSpec, scored: ScoredExamples, base: ScoredExamples | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses (P,) and the rewards (P, 2) of pairs."""
    reference = None
    if PAIR_LOSSES[spec.loss_type].uses_reference:
        assert base is not None  # `reads_base` has asked for it
        reference = _by_pair(base.log_probs)
    pairs = PairLogProbs(_by_pair(scored.log_probs), reference, _by_pair(scored.tokens))
    losses, rewards = pair_losses(pairs, spec)
    return losses.numpy(), rewards.numpy()


def _by_pair(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).view(-1, 2)


def _answer_rewards(spec: PreferenceSpec, scored: ScoredExamples, base: ScoredExamples) -> np.ndarray:
    return spec.beta * (scored.log_probs - base.log_probs)


def _metrics(options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None) -> Metrics:
    spec = options.section(PreferenceSpec)
    if spec.loss_type == "kto":
        return _metrics_of_answers(spec, scored, base)
    log_probs = _by_pair(scored.log_probs).numpy()
    found: dict[str, Measured] = {}
    if base is not None or not PAIR_LOSSES[spec.loss_type].uses_reference:
        losses, rewards = _pair_numbers(spec, scored, base)
        margins = rewards[:, CHOSEN] - rewards[:, REJECTED]
        # the cross-entropy of the chosen answers is not part of it
        found["pair_loss" if sft_weight_of(spec) else "loss"] = mean_of(losses)
        found["rewards/accuracies"] = mean_of(margins > 0)
        found["rewards/margins"] = mean_of(margins)
        found["rewards/chosen"] = mean_of(rewards[:, CHOSEN])
        found["rewards/rejected"] = mean_of(rewards[:, REJECTED])
    found["log_probs/accuracies"] = mean_of(log_probs[:, CHOSEN] > log_probs[:, REJECTED])
    found["log_probs/chosen"] = mean_of(log_probs[:, CHOSEN])
    found["log_probs/rejected"] = mean_of(log_probs[:, REJECTED])
    return found


def _metrics_of_answers(spec: PreferenceSpec, scored: ScoredExamples, base: ScoredExamples | None) -> Metrics:
    """Return the measures of single answers. The loss of kto compares with other answers of a batch: it is left out."""
    desirable = scored.examples.desirable == 1
    found: dict[str, Measured] = {}
    if base is not None:
        rewards = _answer_rewards(spec, scored, base)
        found["rewards/chosen"] = mean_of(rewards * desirable, desirable)
        found["rewards/rejected"] = mean_of(rewards * ~desirable, ~desirable)
    found["log_probs/chosen"] = mean_of(scored.log_probs * desirable, desirable)
    found["log_probs/rejected"] = mean_of(scored.log_probs * ~desirable, ~desirable)
    return found


def _predictions(
    options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None
) -> Iterator[dict[str, Any]]:
    spec = options.section(PreferenceSpec)
    if spec.loss_type == "kto":
        assert base is not None  # `reads_base` has asked for it
        rewards = _answer_rewards(spec, scored, base)
        for index, example in enumerate(scored.examples):
            numbers = {"log_prob": float(scored.log_probs[index]), "implicit_reward": float(rewards[index])}
            yield {"source": example.source, "desirable": example.desirable == 1, **numbers}
        return
    _, of_pairs = _pair_numbers(spec, scored, base)
    log_probs = _by_pair(scored.log_probs).numpy()
    for index, example in enumerate(scored.examples):
        chosen, rejected = (float(value) for value in of_pairs[index])
        yield {
            "source": example.source,
            "log_prob_chosen": float(log_probs[index, CHOSEN]),
            "log_prob_rejected": float(log_probs[index, REJECTED]),
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "margin": chosen - rejected,
        }


PAIR_MEASURES = ExampleMeasures(_metrics, _predictions, _reads_base)
