"""A sweep over learning rates: one run each in this process, and the one with the lowest evaluation loss.

From the root of the repository, with a tiny model on a CPU, or with your recipe on a GPU:

    python docs/examples/sweep.py
    python docs/examples/sweep.py my_recipe.yaml --steps 100 --rates 1e-5 2e-5 5e-5
"""

import argparse
import tempfile

import ligertune

QUICKSTART = "configs/quickstart/stories260k.yaml"


def sweep(recipe, steps, rates):
    """Train with each learning rate, and return rate -> evaluation loss. The recipe must hold out data."""
    folder = tempfile.mkdtemp()
    losses = {}
    for rate in rates:
        overrides = [
            f"checkpoint.output_dir={folder}/{rate:g}",
            f"train.max_steps={steps}",
            f"train.learning_rate={rate:g}",
            "checkpoint.save_strategy=no",
        ]
        losses[rate] = ligertune.train(recipe, overrides).eval_loss
        print(f"learning rate {rate:g}: evaluation loss {losses[rate]:.4f}")
    best = min(losses, key=losses.get)
    print(f"lowest with {best:g}: {folder}/{best:g}/model")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=QUICKSTART)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-3, 5e-3])
    sweep(**vars(parser.parse_args()))
