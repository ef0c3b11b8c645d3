"""Train a target from random weights, let it write texts, train a draft head on them, and measure the head.

`python tests/support/tasks/draft_learning.py FOLDER` prints what each step took and found; with --small on a CPU.
"""

import argparse
import gzip
import itertools
import json
import tempfile
import time
from pathlib import Path

from support.command_line import ROOT, run_here

STORIES = ROOT / "configs" / "medusa" / "stories.jsonl.gz"
TOKENIZER = ROOT / "configs" / "quickstart" / "stories260K"
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 12}
SMALL_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
PROMPT_WORDS = 4


def learn(folder: Path, *, small: bool = False) -> dict:
    """Return the number of the target's parameters, and what `ligertune draft --measure` found."""
    steps = {"target": 5, "head": 5} if small else {"target": 300, "head": 500}
    target, n_parameters = train_target(folder, SMALL_SIZES if small else SIZES, steps["target"])
    answers = write_answers(folder, target, prompts=20 if small else 1200)
    settings = {
        "model.model_name_or_path": target,
        "data.datasets": [{"path": str(answers)}],
        "data.max_length": 512,
        "data.packing": True,
        "data.val_split": 0.05,
        "draft.draft_vocab_size": None,
        "draft.steps": 4,
        "train.per_device_train_batch_size": 4 if small else 32,
        "train.gradient_accumulation_steps": 1,
        "train.max_steps": steps["head"],
        "train.learning_rate": 2e-3,
        "train.warmup_ratio": 0.1,
        "eval.eval_on_start": True,
        "checkpoint.output_dir": folder / "draft",
    }
    recipe = write_recipe(folder / "draft.json", settings)
    run("draft", recipe, cwd=folder)
    lines = (json.loads(line) for line in (folder / "draft" / "metrics.jsonl").read_text().splitlines())
    expected = [line["eval_accepted_length"] for line in lines if "eval_accepted_length" in line]
    measured = json.loads(run("draft", recipe, "--measure", "--json", cwd=folder))
    return {"parameters": n_parameters, "expected": expected, **measured}


def train_target(folder: Path, sizes: dict, steps: int) -> tuple[Path, int]:
    """Train a Llama with random weights on the bundled stories; return its folder and number of parameters."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=512, num_key_value_heads=sizes["num_attention_heads"], bos_token_id=1, eos_token_id=2,
        max_position_embeddings=1024, **sizes,
    ).save_pretrained(folder / "sizes")  # fmt: skip
    settings = {
        "model.model_name_or_path": folder / "sizes",
        "model.init": "random",
        "model.tokenizer.path": TOKENIZER,
        "data.datasets": [{"path": str(STORIES), "format": "text"}],
        "data.max_length": 512,
        "data.packing": True,
        "train.per_device_train_batch_size": 4 if steps < 10 else 32,
        "train.gradient_accumulation_steps": 1,
        "train.max_steps": steps,
        "train.learning_rate": 6e-4,
        "train.warmup_ratio": 0.1,
        "checkpoint.output_dir": folder / "target",
    }
    report = json.loads(run("train", write_recipe(folder / "target.json", settings), "--json", cwd=folder))
    return folder / "target" / "model", report["n_parameters"]


def write_answers(folder: Path, target: Path, *, prompts: int) -> Path:
    """Return the texts that the target wrote after the first words of stories."""
    with gzip.open(STORIES, "rt", encoding="utf-8") as file:
        stories = [json.loads(line)["text"] for line in itertools.islice(file, prompts)]
    starts = [" ".join(story.split()[:PROMPT_WORDS]) for story in stories]
    prompt_file = folder / "prompts.jsonl"
    prompt_file.write_text("".join(json.dumps({"prompt": start}) + "\n" for start in starts))
    settings = {
        "model.model_name_or_path": target,
        "data.datasets": [{"path": str(prompt_file)}],
        "sample.num_generations": 2 if len(starts) < 100 else 4,
        "sample.max_new_tokens": 300,
        "sample.keep": "all",
        "checkpoint.output_dir": folder / "answers",
    }
    run("sample", write_recipe(folder / "sample.json", settings), cwd=folder)
    return folder / "answers-samples" / "kept.jsonl"


def write_recipe(path: Path, settings: dict) -> Path:
    nested: dict = {"version": 1}
    for dotted, value in settings.items():
        *sections, name = dotted.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = str(value) if isinstance(value, Path) else value
    path.write_text(json.dumps(nested))
    return path


def run(*arguments: object, cwd: Path) -> str:
    started = time.perf_counter()
    done = run_here(*arguments, cwd=cwd)
    print(f"{arguments[0]}: {time.perf_counter() - started:.0f} s", flush=True)
    assert done.code == 0, done.err[-3000:]
    return done.out


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(learn(Path(place), small=options.small)))
