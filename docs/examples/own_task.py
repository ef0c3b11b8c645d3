"""A new loss: a confidence penalty (Pereyra et al. 2017), which keeps the model's distributions from collapsing.

    loss = mean over trained tokens of (cross-entropy - WEIGHT * entropy)

From the root of the repository, with a tiny model on a CPU, or with your recipe on a GPU:

    python docs/examples/own_task.py
    python docs/examples/own_task.py my_recipe.yaml --steps 100
"""

import argparse
import tempfile

import torch.nn.functional as F

import ligertune

QUICKSTART = "configs/quickstart/stories260k.yaml"
WEIGHT = 0.1


class ConfidencePenalty(ligertune.Task):
    """Supervised fine-tuning with a bonus for entropy. The entropy is logged next to the loss."""

    def __init__(self, shape):
        super().__init__(shape, ligertune.Measures(("entropy",)))

    def loss(self, model, batch):
        """Return this batch's part of the loss of the global batch."""
        count = batch["num_items_in_batch"]  # trained tokens of the global batch, over all ranks
        logits, labels = self.predictions(model, batch)
        logits = logits[:, :-1].float()  # position t predicts token t + 1
        labels = labels[:, 1:]
        log_probs = F.log_softmax(logits, dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)[labels != -100]
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        self.measures.add("entropy", entropy)
        return (cross_entropy - WEIGHT * entropy.sum()) / count


def train(recipe, steps):
    """Train with the penalty, and return the report."""
    overrides = [f"checkpoint.output_dir={tempfile.mkdtemp()}/run", f"train.max_steps={steps}"]
    report = ligertune.train(recipe, overrides, task=ConfidencePenalty, show=print)
    print(report)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=QUICKSTART)
    parser.add_argument("--steps", type=int, default=10)
    train(**vars(parser.parse_args()))
