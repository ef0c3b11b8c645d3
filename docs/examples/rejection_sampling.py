"""Rejection sampling: train on a few answers, sample more, keep the right ones, and train again.

    python docs/examples/rejection_sampling.py configs/quickstart/stories260K

A model of 260,000 parameters learns from 30 answers to name the largest of three digits. Then it answers 300 problems
whose answers it is not shown; a function checks them, and the right ones are trained on. `--method dpo` trains on pairs
of a right and a wrong answer instead. docs/sampling.md has the same steps as commands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path


def exact(completions: list[str], right: list[str], **columns: list) -> list[float]:
    """Return 1 for each right answer. `right` is a column of the data; `ligertune` executes this file to call it."""
    return [float(text.strip() == answer) for text, answer in zip(completions, right, strict=True)]


def write(path: Path, problems: list[tuple[int, ...]], *, with_answer: bool) -> str:
    """Write a problem per line: with its answer to train on, or with a column for the score function."""
    column = "completion" if with_answer else "right"
    rows = [{"prompt": f"max {' '.join(map(str, digits))}:", column: str(max(digits))} for digits in problems]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def recipe(model: str, data: list[str], folder: Path, **sections: object) -> dict[str, object]:
    """Return a recipe. Rows of texts are not packed: they are equally long."""
    datasets = {
        "datasets": [{"path": path} for path in data],
        "max_length": 32,
        "packing": False,
        "padding_free": False,
    }
    return {
        "model": {"model_name_or_path": model, "dtype": "float32"},
        "data": datasets,
        "checkpoint": {"output_dir": str(folder), "save_strategy": "no", "overwrite": True},
        **sections,
    }


def main() -> dict[str, float]:
    # here, because the process that calls `exact` executes this file, and torch takes seconds to import
    import ligertune
    from ligertune.features.sample.sample_run import sample_recipe

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, default=Path("runs/rejection_sampling"))
    parser.add_argument("--method", choices=("sft", "dpo"), default="sft")
    parser.add_argument("--steps", type=int, nargs=2, default=(25, 60), help="of the first and the second training")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)

    problems = list(itertools.product(range(10), repeat=3))
    random.Random(given.seed).shuffle(problems)
    labelled = write(folder / "labelled.jsonl", problems[:30], with_answer=True)
    unlabelled = write(folder / "unlabelled.jsonl", problems[30:330], with_answer=False)
    held_out = write(folder / "held_out.jsonl", problems[330:530], with_answer=False)
    train = {"learning_rate": 5e-3, "lr_scheduler_type": "linear", "per_device_train_batch_size": 64}
    train |= {"gradient_accumulation_steps": 1, "warmup_steps": 0, "seed": given.seed}
    sample = {"score": f"{Path(__file__).resolve()}:exact", "max_new_tokens": 4, "seed": given.seed}

    def rate(run: str) -> float:
        """Return the share of right answers to held-out problems, greedily."""
        greedy = {"num_generations": 1, "temperature": 0.0, "keep": "all", "source": str(folder / run)}
        asked = recipe(given.model, [held_out], folder / f"{run}-held-out", sample=sample | greedy)
        return sample_recipe(asked, overwrite=True).score.mean

    ligertune.train(recipe(given.model, [labelled], folder / "first", train=train | {"max_steps": given.steps[0]}))
    before = rate("first")

    keep = {"sft": "best", "dpo": "pairs"}[given.method]
    many = {"num_generations": 8, "keep": keep, "threshold": 1.0, "source": str(folder / "first")}
    sampled = sample_recipe(recipe(given.model, [unlabelled], folder / "first", sample=sample | many), overwrite=True)

    kept = sampled.files["kept"]
    train["max_steps"] = given.steps[1]
    if given.method == "sft":
        data = [labelled, kept]
        method: dict[str, object] = {"task": "sft", "train": train}
    else:  # DPO alone lowers the probability of the right answers, too, in a model that has seen 30 of them
        data = [kept]
        method = {"task": "dpo", "preference": {"sft_weight": 1.0}, "train": train | {"learning_rate": 3e-3}}
    ligertune.train(recipe(str(folder / "first" / "model"), data, folder / "second", **method))
    after = rate("second")
    print(f"right answers to held-out problems: {before:.0%} before, {after:.0%} after {sampled.kept} kept answers")
    return {"before": before, "after": after, "kept": sampled.kept}


if __name__ == "__main__":
    result = main()
