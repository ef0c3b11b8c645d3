"""A recipe of additions for the tiny model, with rules that score answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

RULES = """
def vowels(completions, **columns):
    return [sum(letter in "aeiou" for letter in text) for text in completions]

def near(completions, right):
    return [1.0 / (1 + abs(len(text) - answer)) for text, answer in zip(completions, right, strict=True)]

def broken(completions, **columns):
    raise ValueError("no rule for this")

def hangs(completions, **columns):
    while True:
        pass
"""


@pytest.fixture
def folder(tmp_path: Path, quickstart: Path) -> Path:
    """A folder with recipe.yaml, prompts.jsonl and rules.py."""
    rows = [{"prompt": f"{number}+1=", "right": number + 1} for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "rules.py").write_text(RULES, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{model_name_or_path: {quickstart / 'stories260K'}, dtype: float32}}\n"
        "data: {datasets: [{path: prompts.jsonl}]}\n"
        "checkpoint: {output_dir: run}\n"
        "sample: {num_generations: 3, max_new_tokens: 8, score: 'rules.py:vowels'}\n",
        encoding="utf-8",
    )
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread, as commands of tests do: threads of a tiny model wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
