"""A loop of your own around ligertune's model, data and step.

From the root of the repository, with a tiny model on a CPU, or with your recipe on a GPU:

    python docs/examples/own_loop.py
    python docs/examples/own_loop.py my_recipe.yaml --steps 100
"""

import argparse
import tempfile

import ligertune

QUICKSTART = "configs/quickstart/stories260k.yaml"


def train(recipe, steps):
    """Train for some steps with a loop in plain sight, and return the loss of each."""
    overrides = [f"checkpoint.output_dir={tempfile.mkdtemp()}/run", f"train.max_steps={steps}"]
    trainer = ligertune.Trainer(recipe, overrides)
    print(f"{trainer.plan.n_trainable:,} parameters train on {trainer.plan.data.examples:,} examples")
    losses = []
    with trainer.open() as training:  # the patched model on its device, optimizer, batches
        for step in range(steps):
            loss, grad_norm = training.run_step(step)  # forward, backward and update of one global batch
            losses.append(loss)
            rate = training.rates.at(step)
            print(f"step {step + 1}: loss {loss:.4f}, gradient norm {grad_norm:.2f}, learning rate {rate:.1e}")
        training.model.save_pretrained(training.plan.output_dir / "model")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=QUICKSTART)
    parser.add_argument("--steps", type=int, default=10)
    train(**vars(parser.parse_args()))
