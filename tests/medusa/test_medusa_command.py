"""`ligertune medusa` on the tiny bundled model: heads that learn, resume, a second stage, and bad input."""

from __future__ import annotations

import json

import pytest
from command_line import losses, overrides
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SHORT = {
    "train.max_steps": 6,
    "train.per_device_train_batch_size": 2,
    "logging.logging_steps": 1,
    "medusa.eval_prompts": 0,
    "data.datasets.0.max_samples": 60,
}


@pytest.fixture(scope="module")
def learned(ligertune, runs) -> dict:
    """The report of 260 steps with the bundled recipe, trained in `runs`/runs/medusa: most of a minute."""
    done = ligertune("medusa", "--json", "--set", "train.max_steps=260")
    assert done.code == 0, done.err[-3000:]
    assert "No recipe given: using" in done.err and "medusa/stories260k.yaml" in done.err
    return json.loads(done.out)


def test_heads_learn_to_guess_held_out_stories(learned, runs):
    """At least 1.8 tokens a pass, and the very text of plain decoding."""
    found = learned["medusa"]
    assert found["measured_on"] == "60 held-out examples"
    assert found["decoding"]["accepted_length"] >= 1.8
    assert found["decoding"]["identical"] == found["decoding"]["prompts"] == 8
    assert found["top1"][0] > 0.25 and found["top5"][0] > 0.45
    assert found["top1"] == sorted(found["top1"], reverse=True)  # further ahead is harder
    assert json.loads((runs / "runs/medusa/medusa_report.json").read_text()) == found
    assert (runs / "runs/medusa/medusa_report.png").stat().st_size > 1000


def test_the_report_can_be_asked_for_again(learned, ligertune):
    done = ligertune("medusa", "--report", "--json", "--set", "medusa.tree_nodes=6", "--set", "medusa.eval_prompts=2")
    assert done.code == 0, done.err[-3000:]
    again = json.loads(done.out)
    assert again["top1"] == pytest.approx(learned["medusa"]["top1"], abs=1e-6)
    assert again["tree_nodes"] == 6 < learned["medusa"]["tree_nodes"]
    assert again["decoding"]["prompts"] == 2


def test_generate_writes_the_same_text_with_heads(learned, ligertune, quickstart):
    prompt = ("Once upon a time", "--raw", "--max-new-tokens", "60")
    plain = ligertune("generate", quickstart / "stories260K", *prompt, "--json")
    fast = ligertune("generate", "runs/medusa", *prompt, "--medusa", "--json")
    assert (plain.code, fast.code) == (0, 0), plain.err + fast.err
    plain, fast = json.loads(plain.out), json.loads(fast.out)
    assert fast["text"] == plain["text"] and fast["new_tokens"] == 60
    assert fast["accepted_length"] > 1.5
    typical = ("--medusa", "--acceptance", "typical", "--temperature", "0.8")
    sampled = [ligertune("generate", "runs/medusa", *prompt, *typical, "--seed", s).out for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_stage_2_trains_the_model_and_starts_from_the_heads(learned, ligertune, runs, quickstart):
    done = ligertune("medusa", "--stage", 2, "--json", *overrides(SHORT))
    assert done.code == 0, done.err[-3000:]
    assert json.loads(done.out)["eval_loss"] < 8
    folder = runs / "runs/medusa-stage2"
    before = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K").state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert any((before[name] != after[name]).any() for name in before)
    config = json.loads((folder / "medusa" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str((folder / "model").resolve())
    moved = ligertune("generate", "runs/medusa-stage2", "Once upon a time", "--raw", "--medusa", "--json")
    assert moved.code == 0, moved.err
    other = ligertune("medusa", "--stage", 2, "--heads", 3, *overrides({"checkpoint.output_dir": "other"}))
    assert other.code == 2 and "medusa.num_heads: 3, but the heads" in other.err
    again = ["--from", "runs/medusa-stage2/medusa", *overrides({**SHORT, "checkpoint.output_dir": "other"})]
    wrong = ligertune("medusa", "--stage", 2, *again)
    assert wrong.code == 2 and "this is another model" in wrong.err


@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_resume_is_bit_exact(ligertune, runs, lm_head):
    settings = {**SHORT, "medusa.lm_head": lm_head, "checkpoint.output_dir": lm_head, "checkpoint.save_steps": 4}
    assert ligertune("medusa", *overrides(settings)).code == 0
    expected = losses(runs / lm_head)
    weights = load_file(runs / lm_head / "medusa" / "medusa_lm_head.safetensors")
    (runs / lm_head / "report.json").unlink()  # as if it had been killed after step 4
    again = ligertune("medusa", *overrides(settings), "--resume")
    assert again.code == 0, again.err[-3000:]
    assert losses(runs / lm_head) == expected
    resumed = load_file(runs / lm_head / "medusa" / "medusa_lm_head.safetensors")
    assert all((resumed[name] == t).all() for name, t in weights.items())


# what is given beside --stage 1 or 2 -> words that the sentence must hold
BAD = {
    "no heads": (["--heads", 0], "medusa.num_heads is 0"),
    "no such stage": (["--stage", 3], "medusa.stage is 3"),
    "heads that were never trained": (["--stage", 2, "--from", "nowhere/medusa"], "nowhere/medusa"),
    "a folder without heads": (["--stage", 2, "--from", "."], "holds no trained heads"),
    "a context shorter than the heads reach": (["--set", "data.max_length=5"], "data.max_length is 5"),
    "a model that is not there": (["--model", "./nowhere"], "model.model_name_or_path"),
    "data that is not there": (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    "a report on nothing": (["--report", "--set", "checkpoint.output_dir=empty"], "empty/medusa"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_sentence_and_exit_code_2(name, ligertune):
    given, words = BAD[name]
    done = ligertune("medusa", *given)
    assert done.code == 2, done.err
    assert words in done.err and "Traceback" not in done.err and len(done.err) < 1500


GENERATE = {
    "no heads": (["nowhere", "Hi", "--medusa"], "holds no Medusa heads"),
    "greedy at a temperature": (["x", "Hi", "--medusa", "--temperature", 0.5], "--acceptance typical"),
    "typical without one": (["x", "Hi", "--medusa", "--acceptance", "typical"], "--temperature"),
}


@pytest.mark.parametrize("name", GENERATE)
def test_generate_refuses_what_does_not_go_together(name, ligertune):
    given, words = GENERATE[name]
    done = ligertune("generate", *given)
    assert done.code == 2 and words in done.err, done.err
