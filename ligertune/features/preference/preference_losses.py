"""Losses of preference optimisation on the log-probabilities of P pairs of answers, with TRL's definitions.

score of an answer  s = log p(answer) - log p_ref(answer), without the second term for simpo and orpo;
                    divided by the answer's tokens for ipo, simpo, orpo, and with length_normalization
margin              m = s_chosen - s_rejected

sigmoid  -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)           DPO (Rafailov 2023), e: label_smoothing
robust   (-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2e)   Robust DPO (Chowdhury 2024)
hinge    max(0, 1 - beta m)                                              SLiC (Zhao 2023)
ipo      (m - 1 / (2 beta))^2                                            IPO (Azar 2023)
simpo    -log sigmoid(beta m - simpo_gamma)                              SimPO (Meng 2024)
orpo     -orpo_alpha log sigmoid(log odds_chosen - log odds_rejected)    ORPO (Hong 2024), odds = p / (1 - p)
kto      1 - sigmoid(beta (s - kl)) for a desirable answer, 1 - sigmoid(beta (kl - s)) for another
                                                                         KTO (Ethayarajh 2024), single answers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

if TYPE_CHECKING:
    from ligertune.features.preference.recipe import PreferenceSpec

CHOSEN = 0  # column of the tensors (P, 2)
REJECTED = 1  # the other column


@dataclass(frozen=True)
class PairLogProbs:
    """Log-probabilities of P pairs of answers, summed over each answer's tokens."""

    policy: Tensor  # (P, 2)
    reference: Tensor | None  # (P, 2); None for losses without a reference
    tokens: Tensor  # (P, 2) trained tokens


@dataclass(frozen=True)
class PairLoss:
    """A row of PAIR_LOSSES: the loss (P,) of scores (P, 2), and which scores it reads."""

    of_scores: Callable[[Tensor, PreferenceSpec], Tensor]
    uses_reference: bool = True
    per_token: bool = False  # always divides scores by the answer's tokens
    reward_weight: str = "beta"  # the option that turns scores into rewards


def _margin(scores: Tensor) -> Tensor:
    return scores[:, CHOSEN] - scores[:, REJECTED]


def _sigmoid(scores: Tensor, options: PreferenceSpec) -> Tensor:
    margin = options.beta * _margin(scores)
    smoothing = options.label_smoothing
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def _robust(scores: Tensor, options: PreferenceSpec) -> Tensor:
    margin = options.beta * _margin(scores)
    smoothing = options.label_smoothing
    return (-(1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)) / (1 - 2 * smoothing)


def _hinge(scores: Tensor, options: PreferenceSpec) -> Tensor:
    return torch.relu(1 - options.beta * _margin(scores))


def _ipo(scores: Tensor, options: PreferenceSpec) -> Tensor:
    return (_margin(scores) - 1 / (2 * options.beta)) ** 2


def _simpo(scores: Tensor, options: PreferenceSpec) -> Tensor:
    return -logsigmoid(options.beta * _margin(scores) - options.simpo_gamma)


def _orpo(scores: Tensor, options: PreferenceSpec) -> Tensor:
    # log p - log(1 - p). For p near 1, 1 - exp(log p) rounds to 0, and expm1 does not.
    log_odds = scores - torch.log(-torch.expm1(scores))
    return -options.orpo_alpha * logsigmoid(_margin(log_odds))


PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(_sigmoid),
    "robust": PairLoss(_robust),
    "hinge": PairLoss(_hinge),
    "ipo": PairLoss(_ipo, per_token=True),
    "simpo": PairLoss(_simpo, uses_reference=False, per_token=True),
    "orpo": PairLoss(_orpo, uses_reference=False, per_token=True, reward_weight="orpo_alpha"),
}


def pair_losses(pairs: PairLogProbs, options: PreferenceSpec) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair (P,), and the rewards of its answers (P, 2), which are detached.

    The cross-entropy of sft_weight and of orpo is not among them: it is a mean over tokens, not over pairs.
    """
    row = PAIR_LOSSES[options.loss_type]
    scores = pairs.policy if pairs.reference is None else pairs.policy - pairs.reference
    per_token = scores / pairs.tokens.clamp(min=1)
    losses = row.of_scores(per_token if row.per_token or options.length_normalization else scores, options)
    rewarded = scores if row.uses_reference else per_token
    return losses, getattr(options, row.reward_weight) * rewarded.detach()


def sft_weight_of(options: PreferenceSpec) -> float:
    """Return the weight of the cross-entropy of the chosen answers."""
    return 1.0 if options.loss_type == "orpo" else options.sft_weight


def kto_losses(scores: Tensor, desirable: Tensor, kl: Tensor, options: PreferenceSpec) -> Tensor:
    """Return the loss (A,) of single answers with scores (A,). desirable (A,) bool.

    kl (): estimate of the divergence of the policy from the reference, at least 0.
    """
    gain = torch.where(desirable, scores - kl, kl - scores)
    weights = torch.where(desirable, options.desirable_weight, options.undesirable_weight)
    return weights * (1 - torch.sigmoid(options.beta * gain))
