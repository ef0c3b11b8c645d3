"""Runs of task: classification and task: reward with the quickstart's tiny Llama."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.command_line import RECIPE, metrics, run_here
from support.models.tiny_families import tiny_family
from support.quickstart_runs import RESUME, plan_run, saves, train, train_ranks, unfinished
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from ligertune.errors import UserError
from ligertune.features.scores.recipe import ClassificationSpec
from ligertune.run import run

FREE = {"train.group_by_length": False, "data.val_split": 0.1, "model.dtype": "float32", "train.learning_rate": 1e-3}


@pytest.fixture(scope="module")
def texts(tmp_path_factory, quickstart) -> dict[str, object]:
    """Settings of a classification: is an instruction a question?"""
    lines = (quickstart / "dolly_short.jsonl").read_text(encoding="utf-8").splitlines()[:48]
    rows = [json.loads(line)["instruction"] for line in lines]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    labelled = ({"text": text, "label": "question" if "?" in text else "order"} for text in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return {**FREE, "task": "classification", "data.datasets": [{"path": str(path)}]}


@pytest.fixture(scope="module")
def pairs(quickstart) -> dict[str, object]:
    dataset = {"path": str(quickstart / "preferences.jsonl"), "max_samples": 40}
    return {**FREE, "task": "reward", "data.datasets": [dataset]}


def lines_of(folder: Path) -> list[dict]:
    """Return losses and measures of steps and evaluations."""
    timed = ("time", "seconds", "remaining_seconds", "note")
    found = [line for line in metrics(folder / "run") if "loss" in line or "eval_loss" in line]
    return [
        {k: v for k, v in line.items() if k not in timed and "per_second" not in k and "memory" not in k}
        for line in found
    ]


def test_a_model_that_may_carry_state_is_planned_before_its_labels_are_counted(texts, tmp_path):
    """Its layers are looked at on the meta device, before the data tell how many labels there are."""
    config = tiny_family("causal", "qwen3_5_text").config
    config.vocab_size = 512
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = {"model.tokenizer.path": str(RECIPE.parent / "stories260K")}
    plan = plan_run(tmp_path, **texts, **tokenizer, **{"model.model_name_or_path": str(tmp_path / "model")}).plan
    assert plan.build.section(ClassificationSpec).num_labels == 2


def test_packed_rows_have_the_losses_of_padded_ones_and_the_saved_model_the_scores(texts, tmp_path):
    """The saved model, read by transformers alone, has the evaluation loss of the run."""
    changes = {**texts, "train.max_steps": 2, "train.per_device_train_batch_size": 4}
    found = {}
    for free in (True, False):
        job = plan_run(tmp_path / str(free), **changes, **{"data.padding_free": free})
        assert job.plan.rows.padding_free is free and not job.plan.loss_in_head
        assert run(job, lambda line: None).status == "completed"
        found[free] = lines_of(tmp_path / str(free))
    for ours, other in zip(found[True], found[False], strict=True):
        assert {k: v for k, v in ours.items() if k not in ("padded_tokens",)} == pytest.approx(
            {k: v for k, v in other.items() if k not in ("padded_tokens",)}, rel=1e-5, abs=1e-6
        )
    folder = tmp_path / "True" / "run" / "model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "order", 1: "question"}
    held_out = job.data.eval
    rows = [tokenizer.decode(example.input_ids, skip_special_tokens=True) for example in held_out]
    with torch.no_grad():  # padded in one batch
        scores = model(**tokenizer(rows, return_tensors="pt", padding=True)).logits
    labels = torch.tensor([int(example.targets[0]) for example in held_out])
    expected = found[True][-1]
    assert float(torch.nn.functional.cross_entropy(scores, labels)) == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert float((scores.argmax(1) == labels).float().mean()) == pytest.approx(expected["eval_accuracy"])


@pytest.mark.slow
def test_the_adapter_and_its_score_head_are_saved_and_merged(pairs, tmp_path):
    """PEFT and transformers alone, and `ligertune export --check`, find the trained scores."""
    train(tmp_path, **{**pairs, "method.type": "lora", "method.lora_r": 4, "data.packing": True})
    folder = tmp_path / "run" / "model"
    base = AutoModelForSequenceClassification.from_pretrained(
        json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"], num_labels=1
    )
    ids = torch.tensor([[1, 400, 401, 402]])
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, folder).eval()(input_ids=ids).logits
    done = run_here("export", "run", "--out", "merged", "--check", cwd=tmp_path)
    assert done.code == 0, done.err
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-5)
    refused = run_here("generate", "run", "Hello", cwd=tmp_path)
    assert refused.code == 2 and "scores texts and writes none" in refused.err
    with pytest.raises(UserError, match=r"scores texts and writes none.*task is sft"):
        plan_run(tmp_path / "sft", **{"model.model_name_or_path": str(tmp_path / "merged")})


@pytest.mark.slow
@pytest.mark.parametrize("task", ["texts", "pairs"])
@pytest.mark.parametrize("packing", [True, False])
def test_a_resumed_run_is_bit_equal(task, packing, tmp_path, request):
    changes = {**request.getfixturevalue(task), "data.packing": packing, "train.max_steps": 4, **saves(2)}
    changes |= {"eval.eval_strategy": "steps", "eval.eval_steps": 2}
    train(tmp_path / "whole", **changes)
    train(tmp_path / "parts", **{**changes, "checkpoint.save_total_limit": 5})
    parts = unfinished(tmp_path / "parts")
    train(tmp_path / "parts", **changes, **RESUME)
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    assert (parts / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "run" / "model" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["texts", "pairs"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(task, strategy, tmp_path, request):
    changes = {**request.getfixturevalue(task), "data.packing": True, "eval.eval_strategy": "steps"}
    changes |= {"eval.eval_steps": 3, "train.per_device_train_batch_size": 1, "train.global_batch_size": 2}
    expected = train_ranks(1, tmp_path / "one", **changes)
    found = train_ranks(2, tmp_path / "two", **changes, **{"parallel.strategy": strategy})
    assert found == pytest.approx(expected, rel=1e-5)
    ours, other = (lines_of(tmp_path / name)[-1] for name in ("two", "one"))
    assert ours.keys() == other.keys()
    assert ours["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    assert ours["eval_accuracy"] == pytest.approx(other["eval_accuracy"])


@pytest.mark.slow
def test_a_reward_model_and_a_classifier_learn(texts, pairs, tmp_path):
    for name, changes in (("texts", texts), ("pairs", pairs)):
        more = {"train.max_steps": 40, "eval.eval_strategy": "steps", "eval.eval_steps": 40}
        train(tmp_path / name, **{**changes, **more, "train.learning_rate": 3e-3, "data.packing": True})
        steps = [line for line in lines_of(tmp_path / name) if "loss" in line]  # the others are evaluations
        assert steps[-1]["accuracy"] >= 0.9 and steps[-1]["loss"] < 0.5 * steps[0]["loss"]


@pytest.mark.slow
def test_freeze_trains_the_score_head_with_the_named_parameters(texts, tmp_path):
    plan = plan_run(tmp_path, **{**texts, "method.type": "freeze", "method.trainable": ["norm"]}).plan
    assert plan.n_trainable == 11 * 64 + 2 * 64


@pytest.mark.slow
@pytest.mark.parametrize("task", ["texts", "pairs"])
def test_qlora_keeps_the_score_head_in_full_precision(task, quickstart, tmp_path, request):
    """bitsandbytes on a CPU needs widths that the quickstart's model does not have."""
    pytest.importorskip("bitsandbytes")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**size, vocab_size=512)).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(quickstart / "stories260K").save_pretrained(tmp_path / "base")
    changes = {**request.getfixturevalue(task), "method.type": "qlora", "data.packing": True}
    train(tmp_path, **changes, **{"model.model_name_or_path": str(tmp_path / "base")})
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert [t.dtype for name, t in saved.items() if name.endswith("score.weight")] == [torch.float32]
    done = run_here("export", "run", "--out", "merged", "--check", cwd=tmp_path)
    assert done.code == 0, done.err
