"""`ligertune medusa` on the tiny bundled model: heads that learn, a second stage, and bad input."""

import json

import pytest
from safetensors.torch import load_file
from support.command_line import overrides, run_here
from support.tasks.medusa_runs import MEDUSA, WEIGHTS, train_medusa

from ligertune.decode.generate import Decoding, generate_answer, load_model
from ligertune.decode.speculative.candidate_tree import Greedy
from ligertune.errors import UserError
from ligertune.features.medusa.command import medusa
from ligertune.features.medusa.decode.medusa_generate import choose_acceptance, generate_with_heads
from ligertune.features.medusa.medusa_run import report_on
from ligertune.planning.options import RunOptions
from ligertune.recipe import load_recipe

NO_OPTIONS = {"recipe": None, "heads": None, "layers": None, "stage": None, "model": None, "data": None, "from_": None,
              "set_": None, "resume": False, "overwrite": False, "report": False, "json": False}  # fmt: skip
SHORT = {
    "train.max_steps": 6,
    "train.per_device_train_batch_size": 2,
    "logging.logging_steps": 1,
    "medusa.eval_prompts": 0,
    "data.datasets.0.max_samples": 60,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder that the module's commands share."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def learned(runs) -> dict:
    """The report of 65 short steps with the bundled recipe, trained in `runs`/runs/medusa."""
    steps = {"train.max_steps": 65, "train.per_device_train_batch_size": 2, "train.learning_rate": 1e-2}
    measured = {"medusa.eval_prompts": 2, "medusa.eval_new_tokens": 48}
    done = run_here("medusa", "--json", *overrides({**steps, **measured}), cwd=runs)
    assert done.code == 0, done.err[-3000:]
    assert "No recipe given: using" in done.err and "medusa/stories260k.yaml" in done.err
    return json.loads(done.out)


def test_heads_learn_to_predict_held_out_stories(learned, runs):
    """At least 1.8 tokens per forward pass, and exactly the text of plain decoding."""
    found = learned["medusa"]
    assert found["measured_on"] == "60 held-out examples"
    speed = found["decoding"]
    assert 1.8 <= speed["accepted_length"] <= found["tree_depth"] + 1
    assert speed["speed_up"] == pytest.approx(speed["tokens_per_second"] / speed["plain_tokens_per_second"])
    assert speed["identical"] == speed["prompts"] == 2
    assert found["top1"][0] > 0.25 and found["top5"][0] > 0.45
    assert found["top1"] == sorted(found["top1"], reverse=True)  # further ahead is harder
    assert json.loads((runs / "runs/medusa/medusa_report.json").read_text()) == found
    assert (runs / "runs/medusa/medusa_report.png").stat().st_size > 1000


def test_the_report_can_be_repeated(learned, runs):
    settings = ["task=medusa", "medusa.tree_nodes=6", "medusa.eval_prompts=1", "medusa.eval_new_tokens=16"]
    settings.append(f"checkpoint.output_dir={runs / 'runs/medusa'}")
    again = report_on(RunOptions.of(load_recipe(MEDUSA, overrides=settings)))
    assert again.top1 == pytest.approx(learned["medusa"]["top1"], abs=1e-6)
    assert again.tree_nodes == 6 < learned["medusa"]["tree_nodes"]
    assert (again.decoding.prompts, again.decoding.new_tokens) == (1, 16)


def test_generate_writes_the_same_text_with_heads(learned, runs, quickstart):
    options = ("--raw", "--max-new-tokens", 60, "--medusa", "--json")
    done = run_here("generate", "runs/medusa", "Once upon a time", *options, cwd=runs)
    assert done.code == 0, done.err
    fast = json.loads(done.out)
    common = {"raw": True, "max_new_tokens": 60, "seed": 1}
    loaded = load_model(str(quickstart / "stories260K"), raw=True)
    plain, *sure, first, second = (
        generate_answer(loaded, "Once upon a time", Decoding(60, temperature, top_p), seed=1)
        for temperature, top_p in ((0.0, 1.0), (1e-3, 1.0), (1.0, 1e-3), (1.0, 1.0), (1.0, 1.0))
    )
    assert {answer.text for answer in sure} == {plain.text} and first.text == second.text != plain.text
    assert fast["text"] == plain.text and fast["new_tokens"] == 60
    assert fast["accepted_length"] > 1.5
    rule, folder = choose_acceptance("typical", 0.8), str(runs / "runs/medusa/medusa")
    sampled = [generate_with_heads(folder, "Once upon a time", **common, acceptance=rule).text for _ in range(2)]
    assert sampled[0] == sampled[1] != plain.text


def test_stage_2_saves_the_model_with_its_heads(learned, runs):
    done = run_here("medusa", "--stage", 2, "--json", *overrides(SHORT), cwd=runs)
    assert done.code == 0, done.err[-3000:]
    folder = runs / "runs/medusa-stage2"
    config = json.loads((folder / "medusa" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str((folder / "model").resolve())
    folder.rename(runs / "moved")
    for key, value in {"num_heads": 9, "num_layers": 3}.items():  # the first stage's heads have others
        refused = run_here("medusa", "--stage", 2, *overrides({**SHORT, f"medusa.{key}": value}), cwd=runs)
        assert refused.code == 2 and f"medusa.{key}: {value}, but the heads" in " ".join(refused.err.split())
    options = {"raw": True, "max_new_tokens": 60, "acceptance": Greedy(), "seed": 0}
    assert generate_with_heads(str(runs / "moved"), "Once upon a time", **options).accepted_length > 1.2


def test_keys_of_the_report_and_the_export(tmp_path):
    keys = {"eval_prompts": 2, "eval_new_tokens": 7, "tree_nodes": 5, "lm_head": "shared", "expand_lm_head": True}
    settings = SHORT | {f"medusa.{key}": value for key, value in keys.items()}
    _, report, folder = train_medusa(tmp_path / "run", **settings)
    report = report["medusa"]
    assert (report["decoding"]["prompts"], report["decoding"]["new_tokens"]) == (2, 14)
    assert report["tree_nodes"] == 5
    assert len(json.loads((folder / "medusa" / "medusa_choices.json").read_text())) == 4
    names = load_file(folder / WEIGHTS).keys()
    assert {"0.1.weight", "3.1.weight"} <= names and "lm_heads.0.weight" not in names


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("medusa.num_heads is 0", {"heads": 0}),
        ("medusa.stage is 3", {"stage": 3}),
        ("there is no folder .*nowhere/medusa", {"stage": 2, "from_": "./nowhere/medusa"}),
        ("data.max_length is 5", {"set_": ["data.max_length=5"]}),
        ("eval.sample_prompts are answered by a model", {"set_": ["eval.sample_prompts=[Once]"]}),
        ("nowhere.jsonl", {"data": "nowhere.jsonl"}),
        ("holds no trained heads", {"stage": 2, "from_": "."}),
        (
            "checkpoint.output_dir: there is no folder empty/medusa",
            {"report": True, "set_": ["checkpoint.output_dir=./empty"]},
        ),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(words, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        medusa(**{**NO_OPTIONS, **options})
    assert not list(tmp_path.iterdir())


def test_options_set_their_keys_and_set_wins(monkeypatch):
    loaded = []
    monkeypatch.setattr("ligertune.features.medusa.command.run_recipe", lambda recipe, json: loaded.append(recipe))
    options = {"heads": 3, "layers": 2, "from_": "some/heads", "model": "a/model", "data": "a/set"}
    medusa(**{**NO_OPTIONS, **options, "set_": ["medusa.num_heads=4"]})
    section, model, data = loaded[0].medusa, loaded[0].model.model_name_or_path, loaded[0].data.datasets[0].path
    assert (section.num_heads, section.num_layers, section.heads_path) == (4, 2, "some/heads")
    assert (model, data) == ("a/model", "a/set")


def test_generate_refuses_contradicting_options():
    with pytest.raises(UserError, match="--acceptance typical"):
        choose_acceptance("greedy", 0.5)
    with pytest.raises(UserError, match="--temperature"):
        choose_acceptance("typical", 0.0)
    with pytest.raises(UserError, match="holds no Medusa heads"):
        generate_with_heads("nowhere", "Hi", raw=True, max_new_tokens=1, acceptance=Greedy(), seed=0)
