"""The task reward: a score per text, higher for the chosen answer of a pair, with TRL's definitions and names.

    loss of a pair   -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2

margin is the pair's, 0 without one; c is `reward.center_rewards_coefficient` (Eisenstein et al. 2023). The loss of a
step is the mean over the pairs of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ligertune.features.scores.recipe import RewardSpec
from ligertune.features.scores.score_task import ScoreTask
from ligertune.features.task import Measures
from ligertune.planning.memory.model_shape import ModelShape

# min_reward and max_reward are means over micro-batches
MEASURES = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")


class RewardTask(ScoreTask):
    """Give the chosen answer of each pair the higher reward."""

    documents = 2

    def __init__(self, shape: ModelShape, options: RewardSpec, device: torch.device) -> None:
        super().__init__(shape)
        self.options = options
        self.measures = Measures(MEASURES, device)

    def target_tensor(self, targets: Sequence[tuple[float, ...]]) -> Tensor:
        """Return the margin of each pair, (P,)."""
        return torch.tensor([target[0] if target else 0.0 for target in targets])

    def loss_of_scores(self, scores: Tensor, targets: Tensor, counts: Tensor, divisor: int) -> Tensor:
        rewards = scores.view(-1, 2)
        difference = rewards[:, 0] - rewards[:, 1]
        losses = -logsigmoid(difference - targets)
        if self.options.center_rewards_coefficient is not None:
            losses = losses + self.options.center_rewards_coefficient * rewards.sum(1) ** 2
        self._measure(rewards.detach(), difference.detach(), counts)
        return losses.masked_fill(~counts, 0.0).sum() / divisor

    def _measure(self, rewards: Tensor, difference: Tensor, counts: Tensor) -> None:
        """Add to the measures. rewards: (P, 2), difference, counts: (P,)."""
        pairs = counts.sum()
        some = counts.any().float()
        self.measures.add("min_reward", rewards.min() * some, some)
        self.measures.add("max_reward", rewards.max() * some, some)
        self.measures.add("mean_reward", rewards * counts[:, None], 2 * pairs)
        self.measures.add("accuracy", (difference > 0) & counts, pairs)
        self.measures.add("margin", difference * counts, pairs)
