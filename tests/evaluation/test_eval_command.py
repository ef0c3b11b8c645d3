"""`ligertune eval`: measures of runs against plain transformers and PEFT, and the numbers of their own evaluation."""

import json
import math
import shutil
from pathlib import Path

import peft
import pytest
import torch
from support.command_line import Done, run_here
from support.quickstart_runs import ALPACA_ROWS, plan_run, train
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ligertune.evaluation.eval_options import EvalOptions
from ligertune.evaluation.eval_target import find_target

STEPS = {"train.max_steps": 2, "train.learning_rate": 1e-2, "data.val_split": 0.3}


def evaluated(folder: Path, *arguments: object) -> dict:
    """Run `ligertune eval --json` in `folder`, and return its report."""
    done = run_here("eval", *arguments, "--json", cwd=folder)
    assert done.code == 0, done.err
    return json.loads(done.out)


def refusal(folder: Path, *arguments: object) -> str:
    done: Done = run_here("eval", *arguments, cwd=folder)
    assert done.code == 2
    assert "Traceback" not in done.err
    return " ".join(done.err.split())


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory) -> Path:
    """The folder of a LoRA run with packed rows."""
    folder = tmp_path_factory.mktemp("adapter")
    train(folder, **STEPS, **ALPACA_ROWS, **{"method.type": "lora", "data.packing": True, "data.max_length": 256})
    return folder


def plain_sums(model: torch.nn.Module, examples) -> list[tuple[float, int, int]]:
    """Loss, labels, and labels that are the most probable token, of each example, by transformers' logits."""
    found = []
    for example in examples:
        ids = torch.tensor(example.input_ids[None].astype("int64"))
        labels = torch.tensor(example.labels[1:].astype("int64"))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].double()
        kept = labels != -100
        losses = torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="none")
        found.append((float(losses.sum()), int(kept.sum()), int((logits.argmax(1) == labels)[kept].sum())))
    return found


def by_hand(sums: list[float], counts: list[int]) -> tuple[float, float]:
    """Return a mean over all labels, and its standard error with examples as clusters."""
    mean = sum(sums) / sum(counts)
    number = len(sums)
    squares = sum((one - mean * count) ** 2 for one, count in zip(sums, counts, strict=True))
    return mean, math.sqrt(number / (number - 1) * squares) / sum(counts)


def test_loss_and_perplexity_of_an_adapter_and_its_base_are_those_of_peft(adapter_run, quickstart):
    found = evaluated(adapter_run, "run")["metrics"]
    job = plan_run(adapter_run / "again", **STEPS, **ALPACA_ROWS, **{"method.type": "lora", "data.max_length": 256})
    base = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K", dtype=torch.float32)
    without = plain_sums(base, job.data.eval)
    adapted = plain_sums(peft.PeftModel.from_pretrained(base, adapter_run / "run" / "model"), job.data.eval)
    counts = [count for _, count, _ in adapted]
    losses = [loss for loss, _, _ in adapted]
    base_losses = [loss for loss, _, _ in without]
    for measured, expected in (
        (found["loss"], by_hand(losses, counts)),
        (found["loss"]["base"], by_hand(base_losses, counts)),
        (found["loss"]["difference"], by_hand([a - b for a, b in zip(losses, base_losses, strict=True)], counts)),
        (found["token_accuracy"], by_hand([right for _, _, right in adapted], counts)),
    ):
        assert (measured["value"], measured["stderr"]) == pytest.approx(expected, rel=2e-5)
    loss, stderr = by_hand(losses, counts)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(loss), rel=2e-5)
    assert found["perplexity"]["stderr"] == pytest.approx(math.exp(loss) * stderr, rel=2e-5)
    report = json.loads((adapter_run / "run" / "report.json").read_text())
    assert found["loss"]["value"] == pytest.approx(report["eval_loss"], rel=1e-5)


def test_padded_batches_of_another_size_give_the_packed_numbers(adapter_run):
    """A recipe means the run that it has trained."""
    padded = ("--set", "data.packing=false", "--set", "data.padding_free=false", "--batch-size", 3)
    found = evaluated(adapter_run, adapter_run / "run" / "resolved_recipe.yaml", "--no-base", *padded)
    packed = evaluated(adapter_run, "run", "--no-base")
    assert found["base"] is None
    assert "base" not in found["metrics"]["loss"]
    for name, measured in packed["metrics"].items():
        assert found["metrics"][name]["value"] == pytest.approx(measured["value"], rel=1e-5)
    assert found["labels"] == packed["labels"] > 0


def test_another_file_is_evaluated_with_predictions_for_each_row_and_the_result_stays_in_the_run(
    adapter_run, quickstart
):
    lines = (quickstart / "dolly_short.jsonl").read_text(encoding="utf-8").splitlines()[100:105]
    (adapter_run / "test.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = evaluated(adapter_run, "run", "--data", "test.jsonl", "--max-samples", 4, "--predict", "rows.jsonl")
    rows = [json.loads(line) for line in (adapter_run / "rows.jsonl").read_text().splitlines()]
    assert found["examples"] == len(rows) == 4
    assert sum(row["tokens"] for row in rows) == found["labels"]
    total = sum(row["loss"] * row["tokens"] for row in rows)
    assert total / found["labels"] == pytest.approx(found["metrics"]["loss"]["value"])
    assert all(row["base_loss"] != row["loss"] for row in rows)
    assert [Path(row["source"]).name for row in rows] == [f"test.jsonl:{line}" for line in range(1, 5)]
    # the result is stored in the run, and shown on its page
    newest = max((adapter_run / "run" / "evaluations").glob("*.json"))
    assert json.loads(newest.read_text())["metrics"] == found["metrics"]
    page = (adapter_run / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("<h2>Evaluations with ligertune eval</h2>") == 1
    words = f"{found['metrics']['loss']['value']:.4f} ± {found['metrics']['loss']['stderr']:.4f}"
    assert f"<td>{words}</td>" in page


def test_a_model_without_a_run_needs_data_and_gives_the_base_numbers_of_a_run(adapter_run, quickstart):
    rows = quickstart / "dolly_short.jsonl"
    words = refusal(adapter_run, quickstart / "stories260K")
    assert "is no run, so no data belong to it" in words
    options = ("--data", rows, "--max-samples", 6, "--set", "data.max_length=256")
    alone = evaluated(adapter_run, quickstart / "stories260K", *options)
    run = evaluated(adapter_run, "run", *options)
    assert alone["base"] is None
    assert alone["metrics"]["loss"]["value"] == pytest.approx(run["metrics"]["loss"]["base"]["value"], rel=1e-5)


def test_a_model_without_a_run_keeps_the_prompt_that_it_was_trained_with(adapter_run, tmp_path):
    shutil.copytree(adapter_run / "run" / "model", tmp_path / "moved")
    saved = json.loads((tmp_path / "moved" / "ligertune.json").read_text())
    assert saved["prompt_template"] == "alpaca"
    options = EvalOptions(data=("rows.jsonl",))
    assert find_target(str(tmp_path / "moved"), options).recipe.data.prompt_template == "alpaca"
    saved |= {"prompt_template": "chat", "system_prompt": "Be brief."}
    (tmp_path / "moved" / "ligertune.json").write_text(json.dumps(saved))
    target = find_target(str(tmp_path / "moved"), options)
    assert (target.recipe.data.prompt_template, target.recipe.data.system_prompt) == ("chat", "Be brief.")
    assert target.base_name == target.recipe.model.model_name_or_path


def test_targets_and_options_that_cannot_be_evaluated_are_refused(adapter_run, quickstart):
    recipe = quickstart / "stories260k.yaml"
    assert "has trained no model" in refusal(adapter_run, recipe)
    assert "there is no folder ./nowhere" in refusal(adapter_run, "./nowhere")
    assert "--set train.max_steps=3: an evaluation takes train from the run" in refusal(
        adapter_run, "run", "--set", "train.max_steps=3"
    )
    assert "--split belongs to --data" in refusal(adapter_run, "run", "--split", "test")
    assert "no file that can be written" in refusal(adapter_run, "run", "--predict", "missing/rows.jsonl")


def test_rewards_of_pairs_are_those_of_the_last_evaluation_of_the_run(tmp_path, quickstart):
    """The run keeps all weights, so its reference is the base model that is loaded again."""
    dataset = {"path": str(quickstart / "preferences.jsonl"), "max_samples": 24}
    settings = {"task": "dpo", "data.datasets": [dataset], "model.dtype": "float32", "train.learning_rate": 1e-3}
    report = train(tmp_path, **{**STEPS, **settings}, **{"data.padding_free": False})
    found = evaluated(tmp_path, "run", "--predict", "rows.jsonl", "--set", "data.padding_free=true")
    metrics = found["metrics"]
    assert metrics["loss"]["value"] == pytest.approx(report.eval_loss, rel=1e-5)
    for name in ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"):
        assert metrics[name]["value"] == pytest.approx(report.eval_measures[name], rel=1e-3, abs=1e-5), name
    assert metrics["log_probs/chosen"]["value"] == pytest.approx(report.eval_measures["logps/chosen"], rel=1e-5)
    assert "base" in metrics["log_probs/accuracies"] and "base" not in metrics["loss"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    margins = [row["reward_chosen"] - row["reward_rejected"] for row in rows]
    assert sum(margins) / len(rows) == pytest.approx(metrics["rewards/margins"]["value"])
    assert "compare with the base model" in refusal(tmp_path, "run", "--no-base")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"preference.loss_type": "kto"},
        {"preference.loss_type": "simpo"},
        {"preference.loss_type": "orpo"},
        {"preference.sft_weight": 0.5},
        {"method.type": "lora", "train.learning_rate": 1e-2},
    ],
)
def test_rewards_of_other_losses_are_those_of_the_run(changes, tmp_path, quickstart):
    pairs = [json.loads(line) for line in (quickstart / "preferences.jsonl").read_text().splitlines()[:24]]
    if "kto" in changes.values():
        rows = [{"prompt": pair["prompt"], "completion": pair[answer], "label": answer == "chosen"}
                for pair in pairs for answer in ("chosen", "rejected")]  # fmt: skip
    else:
        rows = pairs
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"task": "dpo", "data.datasets": [{"path": str(tmp_path / "rows.jsonl")}], "model.dtype": "float32"}
    report = train(tmp_path, **{**STEPS, **settings, "train.learning_rate": 1e-3, **changes})
    metrics = evaluated(tmp_path, "run")["metrics"]
    compared = [name for name in metrics if name.startswith("rewards/")]
    assert len(compared) >= 2
    for name in compared:
        assert metrics[name]["value"] == pytest.approx(report.eval_measures[name], rel=1e-3, abs=1e-5), name
    if "loss" in metrics:
        assert metrics["loss"]["value"] == pytest.approx(report.eval_loss, rel=1e-4)
    else:
        assert "pair_loss" in metrics or "kto" in changes.values()


def test_labels_and_probabilities_of_texts_are_those_of_transformers(tmp_path, quickstart):
    lines = (quickstart / "dolly_short.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    rows = [json.loads(line)["instruction"] for line in lines]
    labelled = [{"text": text, "label": "question" if "?" in text else "order"} for text in rows]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    settings = {"task": "classification", "data.datasets": [{"path": str(tmp_path / "texts.jsonl")}]}
    report = train(tmp_path, **STEPS, **settings, **{"model.dtype": "float32"})
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled[:5]))
    found = evaluated(tmp_path, "run", "--data", "few.jsonl", "--predict", "rows.jsonl")
    assert found["base"] is None
    assert any("no trained score head" in note for note in found["notes"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for row, given in zip(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()), labelled, strict=False):
        with torch.no_grad():
            scores = model(**tokenizer(given["text"], return_tensors="pt")).logits[0].softmax(0)
        expected = dict(zip(("order", "question"), scores.tolist(), strict=True))
        assert row["probabilities"] == pytest.approx(expected, abs=1e-5)
        assert (row["label"], row["true"]) == (max(expected, key=expected.get), given["label"])
    held_out = evaluated(tmp_path, "run")["metrics"]
    assert held_out["loss"]["value"] == pytest.approx(report.eval_loss, rel=1e-4)
    for name, value in report.eval_measures.items():
        assert held_out[name]["value"] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_rewards_of_a_score_head_are_those_of_the_run(tmp_path, quickstart):
    dataset = {"path": str(quickstart / "preferences.jsonl"), "max_samples": 24}
    report = train(tmp_path, **STEPS, **{"task": "reward", "data.datasets": [dataset], "model.dtype": "float32"})
    metrics = evaluated(tmp_path, "run", "--predict", "rows.jsonl")["metrics"]
    assert metrics["loss"]["value"] == pytest.approx(report.eval_loss, rel=1e-4)
    for name in ("accuracy", "margin", "mean_reward"):
        assert metrics[name]["value"] == pytest.approx(report.eval_measures[name], rel=1e-3, abs=1e-5), name
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(row["margin"] for row in rows) / len(rows) == pytest.approx(metrics["margin"]["value"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_in_half_precision_is_evaluated(dtype, tmp_path, quickstart):
    """On a CPU float16 is computed as float32."""
    stored = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K", dtype=getattr(torch, dtype))
    stored.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(quickstart / "stories260K").save_pretrained(tmp_path / "model")
    options = ("--data", quickstart / "dolly_short.jsonl", "--max-samples", 6)
    found, exact = (evaluated(tmp_path, model, *options) for model in ("model", quickstart / "stories260K"))
    loss = exact["metrics"]["loss"]["value"]
    assert found["metrics"]["loss"]["value"] == pytest.approx(loss, rel=1e-4 if dtype == "float16" else 3e-3)
