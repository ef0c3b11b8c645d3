"""`ligertune medusa` on the tiny bundled model: heads that learn, a second stage, and bad input."""

from __future__ import annotations

import json

import pytest
from command_line import overrides

from ligertune.cli.medusa import medusa
from ligertune.decode.acceptance import Greedy
from ligertune.decode.medusa_generate import choose_acceptance, complete_with_heads
from ligertune.errors import UserError

# the command's options, none given
NOTHING = {"recipe": None, "heads": None, "layers": None, "stage": None, "model": None, "data": None, "from_": None,
           "set_": None, "resume": False, "overwrite": False, "report": False, "json": False}  # fmt: skip
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
    sampled = ligertune("generate", "runs/medusa", *prompt, *typical)
    assert sampled.code == 0 and sampled.out.strip() not in fast["text"]


def test_stage_2_leaves_a_model_beside_its_heads(learned, ligertune, runs):
    done = ligertune("medusa", "--stage", 2, "--json", *overrides(SHORT))
    assert done.code == 0, done.err[-3000:]
    folder = runs / "runs/medusa-stage2"
    config = json.loads((folder / "medusa" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str((folder / "model").resolve())
    folder.rename(runs / "moved")
    found = ligertune("generate", "moved", "Once upon a time", "--raw", "--medusa", "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["accepted_length"] > 1.2


# what is given -> words that the sentence must hold
BAD = {
    "no heads": (["--heads", 0], "medusa.num_heads is 0"),
    "a folder without heads": (["--stage", 2, "--from", "."], "holds no trained heads"),
    "a report on nothing": (["--report", "--set", "checkpoint.output_dir=empty"], "empty/medusa"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_sentence_and_exit_code_2(name, ligertune):
    given, words = BAD[name]
    done = ligertune("medusa", *given, *overrides({"checkpoint.output_dir": "empty"}))
    assert done.code == 2, done.err
    assert words in done.err and "Traceback" not in done.err and len(done.err) < 1500


def test_other_bad_input_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = {
        "medusa.stage is 3": {"stage": 3},
        "there is no folder nowhere/medusa": {"stage": 2, "from_": "./nowhere/medusa"},
        "data.max_length is 5": {"set_": ["data.max_length=5"]},
        "model.model_name_or_path": {"model": "./nowhere"},
        "nowhere.jsonl": {"data": "nowhere.jsonl"},
    }
    for words, given in cases.items():
        with pytest.raises(UserError, match=words.replace("nowhere/", ".*nowhere/")):
            medusa(**{**NOTHING, **given})
    assert not list(tmp_path.iterdir())


def test_generate_refuses_what_does_not_go_together():
    with pytest.raises(UserError, match="--acceptance typical"):
        choose_acceptance("greedy", 0.5)
    with pytest.raises(UserError, match="--temperature"):
        choose_acceptance("typical", 0.0)
    with pytest.raises(UserError, match="holds no Medusa heads"):
        complete_with_heads("nowhere", "Hi", raw=True, max_new_tokens=1, acceptance=Greedy(), seed=0)
