"""Prompts and answers of examples, metrics of a user's file, and answers that are scored."""

import numpy as np
import pytest
import torch
from support.quickstart_runs import ALPACA_ROWS, plan_run
from transformers import AutoModelForCausalLM

from ligertune.data.examples import Example, Examples
from ligertune.decode.answer_metric import exact_match, load_metric, read_questions, score_answers
from ligertune.errors import UserError

METRIC = """
def words(answer, reference, prompt):
    return len(answer.split()) + 100 * ("Instruction" in prompt)

def broken(answer, reference, prompt):
    raise ValueError("no")

number = 3
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return plan_run(tmp_path_factory.mktemp("plan"), **ALPACA_ROWS, **{"data.val_split": 0.2})


def example(labelled: list[bool], **fields: object) -> Example:
    ids = np.arange(3, 3 + len(labelled), dtype=np.int32)
    return Example(ids, np.where(labelled, ids, -100).astype(np.int32), "rows.jsonl:1", **fields)


def test_a_question_ends_where_the_last_answer_begins(job):
    tokenizer = job.tokenizer.tokenizer
    asked = read_questions(job.data.eval, tokenizer, most=3, key="k")
    assert len(asked.asked) == 3
    assert asked.end_tokens == (tokenizer.eos_token_id,)
    for question, one in zip(asked.asked, job.data.eval, strict=False):
        begin = int(np.argmax(one.labels != -100))
        assert question.ids == tuple(one.input_ids[:begin])
        assert question.prompt.endswith("### Response:\n")
        assert question.reference == tokenizer.decode(one.input_ids[begin:], skip_special_tokens=True).strip()
    two_turns = example([False, False, True, True, False, False, True])
    (last,) = read_questions(Examples([two_turns]), tokenizer, most=None, key="k").asked
    assert last.ids == (3, 4, 5, 6, 7, 8)


def test_rows_without_one_answer_are_refused(job):
    tokenizer = job.tokenizer.tokenizer
    for rows, words in (
        (example([False, True, True]), "texts without prompts"),
        (example([False, False, True, True], first_length=2), "pairs have no single answer"),
        (example([False, False, True], media=("a.png",)), "prompts with images"),
    ):
        with pytest.raises(UserError, match=words):
            read_questions(Examples([rows]), tokenizer, most=None, key="eval.metric")


def test_metrics_of_files_are_loaded_and_faults_are_named(tmp_path):
    (tmp_path / "own.py").write_text(METRIC)
    (tmp_path / "fails.py").write_text("import nothing_of_this_name\n")
    assert load_metric("exact_match", key="k").score is exact_match
    assert (exact_match(" yes\n", "yes", ""), exact_match("yes", "Yes", "")) == (1.0, 0.0)
    assert load_metric(f"{tmp_path}/own.py:words", key="k").score("a b", "", "Instruction") == 102
    for name, words in (
        ("bleu", "bleu is no metric"),
        ("missing.py:words", "no file missing.py"),
        (f"{tmp_path}/own.py:other", "has no function other"),
        (f"{tmp_path}/own.py:number", "has no function number"),
        (f"{tmp_path}/fails.py:words", "raised ModuleNotFoundError"),
        (f"{tmp_path}/own.py:loss", "loss is the name of a measure"),
    ):
        with pytest.raises(UserError, match=words):
            load_metric(name, key="eval.metric")


def test_answers_are_those_of_transformers_and_end_with_the_token_of_the_data(job, quickstart, tmp_path):
    tokenizer = job.tokenizer.tokenizer
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K", dtype=torch.float32)
    questions = read_questions(job.data.eval, tokenizer, most=3, key="k")
    (tmp_path / "own.py").write_text(METRIC)
    metric = load_metric(f"{tmp_path}/own.py:words", key="k")
    found = score_answers(model, tokenizer, questions, metric, max_new_tokens=12, name="m")
    for one in found:
        ids = torch.tensor([one.question.ids])
        with torch.no_grad():
            made = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert one.answer == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert one.score == 100 + len(one.answer.split())
    second = made[0, ids.shape[1] + 1].item()
    cut = score_answers(
        model, tokenizer, type(questions)(questions.asked[-1:], (second,)), metric, max_new_tokens=12, name="m"
    )
    assert len(tokenizer.encode(cut[0].answer, add_special_tokens=False)) <= 3
    with pytest.raises(UserError, match=r"broken raised ValueError for .*jsonl:\d+: no"):
        score_answers(
            model, tokenizer, questions, load_metric(f"{tmp_path}/own.py:broken", key="k"), max_new_tokens=1, name="m"
        )
