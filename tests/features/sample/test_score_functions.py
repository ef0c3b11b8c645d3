"""A user's score functions: what they get, and one sentence for each way in which they can fail."""

import math
import time
from pathlib import Path

import pytest

from ligertune.errors import UserError
from ligertune.features.sample.recipe import ScoreFunctionSpec
from ligertune.features.sample.scoring.score_functions import ScoreFunctions
from ligertune.features.sample.scoring.score_worker import checked_scores

FILE = """
import asyncio, os, sys, time

def length(completions, **columns):
    print("printed by the user's file")
    return [len(text) for text in completions]

def known(completions, right, prompts=()):
    return [float(text == answer) + 10 * len(prompt) for text, answer, prompt in zip(completions, right, prompts)]

async def slow_server(completions, **columns):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)

def sync_coroutine(completions, **columns):
    return slow_server(completions)

def raises(completions, **columns):
    raise KeyError("no such problem")

def hangs(completions, **columns):
    while True:
        pass

def leaves(completions, **columns):
    os._exit(7)

def unawaited(completions, **columns):
    return [slow_server(completions) for _ in completions]
"""


@pytest.fixture
def functions(tmp_path: Path):
    """functions(*names, timeout=30): the context of these functions, with weights 1, 2, ..."""
    path = tmp_path / "rules.py"
    path.write_text(FILE, encoding="utf-8")

    def make(*names: str, timeout: float = 30.0) -> ScoreFunctions:
        specs = [ScoreFunctionSpec(function=f"{path}:{name}", weight=place) for place, name in enumerate(names, 1)]
        return ScoreFunctions(specs, timeout)

    return make


def test_functions_get_answers_prompts_and_only_the_columns_that_they_take(functions, capfd):
    columns = {"right": ["7", "9"], "id": [1, 2]}
    with functions("length", "known", "slow_server", "sync_coroutine") as scored:
        scored.check_columns(list(columns))
        for _ in range(2):  # the process stays
            found = scored(["7", "eight"], ["3+4=", "4+4="], columns)
            assert found == [[1, 5], [41, 40], [0.5, 0.5], [0.5, 0.5]]
    assert scored.weights == [1, 2, 3, 4]
    said = capfd.readouterr()
    assert not said.out and "printed by the user's file" in said.err  # stdout may hold a JSON report


def test_a_column_that_is_missing_is_said_before_anything_is_sampled(functions):
    with functions("known") as scored, pytest.raises(UserError, match="known asks for right, and the data have the c"):
        scored.check_columns(["answer"])


def test_a_function_that_hangs_is_ended_and_one_that_raises_or_leaves_is_named(functions):
    started = time.monotonic()
    for name, timeout, words in (
        ("hangs", 0.2, "hangs took more than 0.2 seconds and was ended"),
        ("raises", 30, "raises raised KeyError: 'no such problem'"),
        ("leaves", 30, r"leaves ended its process \(exit code 7\)"),
        ("unawaited", 30, "unawaited returned a coroutine as score 1: await it"),
    ):
        with functions(name, timeout=timeout) as scored, pytest.raises(UserError, match=words) as refused:
            scored(["7"], ["3+4="], {})
        assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
        assert scored._process.poll() is not None
    assert time.monotonic() - started < 60


def test_files_that_cannot_be_loaded_are_one_sentence(functions, tmp_path):
    for text, words in (
        (None, "there is no file"),
        ("1 +", "raised SyntaxError"),
        ("def other(): pass", "has no function length"),
        ("length = 3", "has no function length"),
        ("def length(completions, /): pass", "takes completions by position only"),
    ):
        scored = functions("length")
        path = tmp_path / "rules.py"
        path.unlink() if text is None else path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=words), scored:
            pass


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([1.0], "returned 1 scores for 2 answers"),
        ([1.0, math.nan], "returned nan as score 2"),
        ([1.0, math.inf], "returned inf as score 2"),
        ([1.0, None], "returned NoneType as score 2"),
        ([1.0, "2"], "returned str as score 2"),
        (2.0, "returned float, and not a list"),
        ("12", "returned str, and not a list"),
        (None, "returned NoneType, and not a list"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(found, words):
    with pytest.raises(UserError, match=words):
        checked_scores(found, 2)


def test_numbers_of_any_kind_are_scores():
    import numpy as np
    import torch

    assert checked_scores([True, np.float32(0.5)], 2) == [1.0, 0.5]
    assert checked_scores(torch.tensor([1.0, 2.0]), 2) == checked_scores(np.array([1, 2]), 2) == [1.0, 2.0]
