"""`ligertune train` from a recipe to a model that loads; trackers, traces and memory snapshots."""

import json
import sys
from importlib.util import find_spec

import pytest
from support.command_line import RECIPE, losses, overrides, run_here
from support.quickstart_runs import ONE_ROW, plan_run, train

from ligertune.training.metrics.metrics_logger import run_name

SHORT = {"logging.logging_steps": 1, "checkpoint.save_strategy": "no", "data.val_split": 0,
         "checkpoint.output_dir": "run", **ONE_ROW}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 25 steps: (folder, JSON report, output for people)."""
    folder = tmp_path_factory.mktemp("finished")
    settings = {"checkpoint.output_dir": folder / "run", "train.max_steps": 25, "checkpoint.save_steps": 10,
                "logging.logging_steps": 5, "train.gradient_accumulation_steps": 1,
                "train.per_device_train_batch_size": 2}  # fmt: skip
    done = run_here("train", RECIPE, "--json", *overrides(settings), cwd=folder)
    assert done.code == 0, done.err
    return folder / "run", json.loads(done.out), done.err


def test_the_loss_falls_and_the_report_says_so(finished):
    _, report, said = finished
    assert report["status"] == "completed"
    assert report["loss_last"] < report["loss_first"] - 0.3
    assert f"{report['loss_first']:.4f} -> {report['loss_last']:.4f}" in said
    assert "ligertune generate" in said


def test_the_report_counts_tokens_without_padding_and_memory(finished):
    _, report, _ = finished
    speed = report["throughput"]
    assert 0 < speed["trained_tokens_per_second"] < speed["tokens_per_second"] <= speed["padded_tokens_per_second"]
    assert (speed["warmup_steps_excluded"], speed["steps"]) == (5, 20)
    assert speed["mfu"] is None  # the peak of a CPU is unknown
    assert report["peak_memory"]["allocated_run"] > 50 << 20 and report["peak_memory"]["kind"] == "resident"
    share = 1 - speed["tokens_per_second"] / speed["padded_tokens_per_second"]
    assert speed["padding_share"] == pytest.approx(share, abs=1e-9)
    assert speed["padding_share"] < 0.01  # packed rows are padded to a multiple of 16


def test_the_plan_describes_packing(finished):
    folder, _, said = finished
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["rows"]["kind"] == "packed"
    assert plan["rows"]["fill"] > 0.9
    assert plan["attn_implementation"] == "per_document"
    assert "attention     per_document (documents isolated)" in said


def test_the_phases_before_the_first_step_are_printed_and_timed(finished):
    _, report, said = finished
    parts = report["seconds_to_first_step"]
    assert list(parts) == ["planning", "loading the model", "preparing to train", "first step"]
    places = [said.index(f"{name} ...") for name in parts]
    assert places == sorted(places) and places[0] < said.index("attention ") < places[1]
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) - parts["planning"] < report["seconds"]


def test_the_report_counts_the_patched_modules(finished):
    _, report, _ = finished
    applied = {line["kernel"]: line["applied"] for line in report["kernels"]}
    assert applied == {"apply_rope": 5, "rms_norm": 11, "swiglu": 5, "linear_cross_entropy": 1}


def test_a_run_changes_no_module_of_transformers(finished, tmp_path):
    """Packed training, after a run that has imported everything: names of modules, and what they hold."""

    def held():
        modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformers"}
        return {name: {key: id(value) for key, value in vars(module).items()} for name, module in modules.items()}

    before, names = held(), set(sys.modules)
    train(tmp_path, **{"data.packing": True, "train.max_steps": 1})
    assert set(sys.modules) == names
    assert held() == before


def test_a_run_leaves_these_files(finished):
    folder, _, _ = finished
    found = {path.name for path in folder.iterdir()}
    files = {"plan.json", "report.json", "report.html", "metrics.jsonl", "resolved_recipe.yaml", "checkpoints", "model"}
    assert found == files | ({"curves.png"} if find_spec("matplotlib") else set())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-10", "step-20"]
    assert json.loads((folder / "plan.json").read_text())["schedule"]["total_steps"] == 25


def test_the_model_loads_with_transformers_and_its_tokenizer(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, _ = finished
    model, info = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.chat_template
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_generate_continues_a_prompt_in_the_template_of_training(finished, ligertune):
    folder, _, _ = finished
    done = ligertune("generate", folder / "model", "Name three colours.", "--max-new-tokens", "12", "--json")
    answer = json.loads(done.out)
    assert done.code == 0
    assert "### Instruction:\nName three colours." in answer["prompt"]
    assert answer["text"].strip()
    raw = json.loads(ligertune("generate", folder / "model", "Once upon a time", "--raw", "--json").out)
    assert raw["prompt"] == "Once upon a time"


def test_a_folder_that_holds_a_finished_run_is_kept(finished, ligertune, recipe):
    folder, _, _ = finished
    settings = overrides({"checkpoint.output_dir": folder, "train.max_steps": 25})
    refused = ligertune("train", recipe, *settings)
    assert refused.code == 2
    assert f"{folder} already holds a run" in refused.err
    assert "--resume" in refused.err and "--overwrite" in refused.err
    assert (folder / "model" / "config.json").is_file()
    resumed = ligertune("train", recipe, *settings, "--resume")
    assert resumed.code == 2
    assert "is finished (25 steps)" in resumed.err


def test_the_resolved_recipe_reproduces_the_run(tmp_path, ligertune, recipe):
    assert ligertune("train", recipe, *overrides({**SHORT, "train.max_steps": 3})).code == 0
    again = ligertune("train", "run/resolved_recipe.yaml", "--set", "checkpoint.output_dir=second")
    assert again.code == 0, again.err
    assert losses(tmp_path / "run") == losses(tmp_path / "second")


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("tensorboard"), reason="needs tensorboard")
def test_tensorboard_gets_the_losses_under_the_run_name(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"logging.report_to": "[tensorboard]", "logging.run_name": "my-run"}
    train(tmp_path, **changes)
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "my-run"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(tmp_path / "run"))


def test_a_run_has_the_name_of_the_key_or_of_its_folder(tmp_path):
    assert run_name(plan_run(tmp_path).plan) == "run"
    assert run_name(plan_run(tmp_path, **{"logging.run_name": "mine"}).plan) == "mine"


@pytest.mark.slow
def test_profile_steps_writes_a_trace_and_a_run_draws_its_curves(tmp_path):
    from PIL import Image

    changes = {"report.profile_steps": 1, "report.warmup_steps": 0, "report.memory_snapshot": True}
    train(tmp_path, **changes)
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"ProfilerStep#1", "aten::mm"} <= names and "ProfilerStep#2" not in names
    assert not (tmp_path / "run" / "profile" / "memory.pickle").exists()  # only GPUs have one
    with Image.open(tmp_path / "run" / "curves.png") as image:
        assert image.size == (960, 960)


@pytest.mark.gpu
def test_memory_snapshot_writes_a_snapshot(tmp_path):
    train(tmp_path, **{"report.memory_snapshot": True})
    assert (tmp_path / "run" / "profile" / "memory.pickle").stat().st_size > 1000
