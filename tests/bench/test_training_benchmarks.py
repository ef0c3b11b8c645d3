"""scripts/bench TABLE: recipes of the tables, rows and ratios of a page, a budget of time, and small runs on a CPU."""

import argparse
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.command_line import ROOT
from support.script_modules import load_script, script_module

from ligertune.compare.side import SIDE_OF
from ligertune.compare.summary import summarise_trials
from ligertune.compare.trial import Failure, Step, Trial
from ligertune.data.examples import Example
from ligertune.recipe import load_recipe

TABLES = script_module("benchmarks.tables.training").TABLES
training = script_module("benchmarks.training")
batches = script_module("benchmarks.sides.batches")


def options_of(monkeypatch, tmp_path, name, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", name, "--out", str(tmp_path), *arguments])
    return training.parse()


def ended(side, rate, losses=(11.0, 11.0)):
    steps = tuple(Step(i, loss, None, 100, 100 / rate) for i, loss in enumerate(losses, 1))
    report = {"throughput": {"tokens_per_second": rate, "mfu": 0.5}, "peak_memory": {"allocated_run": 2**30},
              "kernels": [], "kernels_backend": "triton", "padding_free": False, "fp8": False, "dtype": "bfloat16",
              "batch": "", "attn_implementation": "sdpa"}  # fmt: skip
    return Trial(side, 1, 1, steps, report, None)


def measured_of(case, names, trials, task="sft"):
    return training.Measured(case, 2, training.sides_of(names, task), trials)


def test_every_benchmark_has_a_module_with_a_main_and_a_line_of_help(capsys, monkeypatch):
    bench = load_script("bench")
    for module in bench.MODULES.values():
        path = (ROOT / "scripts" / "benchmarks" / module.replace(".", "/")).with_suffix(".py")
        assert "def main() -> int:" in path.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    assert bench.main() == 0
    said = capsys.readouterr().out
    assert all(f"    {name} " in said for name in bench.MODULES) and all(name in said for name in TABLES)
    monkeypatch.setattr(sys, "argv", ["bench", "no_such_benchmark"])
    assert bench.main() == 2


def test_a_case_with_sides_of_its_own_runs_those_that_are_asked_for(monkeypatch, tmp_path):
    padded, packed = TABLES["hybrid_lora"].cases
    options = options_of(monkeypatch, tmp_path, "hybrid_lora", "--sides", "with,liger")
    found = [training.side_names(options, TABLES["hybrid_lora"], case) for case in (padded, packed)]
    assert found == [[], ["with"]]


@pytest.mark.parametrize(
    ("length", "batches", "expected"),
    [(512, (4, 16, 32), (4, 16, 32)), (4096, (4, 16, 32), (1, 2, 4)), (4096, (4, 8), (1,)), (256, (16,), (32,))],
)
def test_batches_of_longer_rows_have_as_many_tokens(length, batches, expected):
    assert training.scaled(batches, length) == expected


@pytest.mark.parametrize("name", [name for name in TABLES if not name.startswith("vision")])
def test_every_case_has_a_valid_recipe(name, monkeypatch, tmp_path):
    options = options_of(monkeypatch, tmp_path, name, "--small")
    table = TABLES[name]
    for case in table.cases:
        (batch,) = training.batches_of(options, case)
        settings = training.settings_of(options, table, case, batch)
        recipe = load_recipe(script_module("benchmarks.inputs").write_recipe(tmp_path / "recipe.json", settings))
        untimed = min(2, table.warmup)
        # steps that are traced come after the measured ones
        traced = 1 + table.profiled if table.profiled else 0
        assert recipe.train.max_steps == untimed + table.small_steps + traced
        assert recipe.report.warmup_steps == untimed + (table.small_steps if table.profiled else 0)
        assert training.sides_of(table.sides, recipe.task)


@pytest.mark.parametrize("name", ["lora_llama", "lora_qwen", "lora_4bit", "lora_packed"])
def test_loras_are_in_the_published_setting(name, monkeypatch, tmp_path, corpus):
    options = options_of(monkeypatch, tmp_path, "published_lora", "--corpus", str(corpus))
    table = TABLES["published_lora"]
    case = next(case for case in table.cases if case.name == name)
    recipe = load_recipe(training.write_recipe(options, table, case, *case.batches))
    train, method = recipe.train, recipe.method
    assert (method.lora_r, method.lora_alpha, method.lora_target_modules) == (16, 32, "all-linear")
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (2, 16)
    assert train.max_grad_norm == 0 and not train.gradient_checkpointing and recipe.data.max_length == 4096


def test_rows_are_compared_with_hugging_face_and_with_the_published_number(monkeypatch, tmp_path):
    options = options_of(monkeypatch, tmp_path, "published_lora")
    table = TABLES["published_lora"]
    failed = Trial("liger", 1, 1, (), None, Failure("out of memory", "too much"))
    trials = [ended("with", 300.0), failed, ended("without", 200.0)]
    measured = measured_of(table.cases[0], ["with", "liger", "hf"], trials)
    rows = training.with_ratios(training.rows_of_point(options, table, measured, measured.point))
    found = [(row["side"], row["times"], round(row["times_published"], 3)) for row in rows]
    published = table.cases[0].published
    assert found[0] == (table.published_by, published / 200, 1.0)
    assert found[1:] == [
        ("ligertune", 1.5, round(300 / published, 3)),
        ("Hugging Face", 1.0, round(200 / published, 3)),
    ]


def test_packed_rows_are_compared_with_the_fastest_padded_batch(monkeypatch, tmp_path):
    options = options_of(monkeypatch, tmp_path, "hybrid_lora")
    table = TABLES["hybrid_lora"]
    padded, packed = table.cases
    rates = {4: 100.0, 8: 160.0, 16: 150.0}
    assert training.batches_of(options, padded) == tuple(rates)
    found = [
        training.Measured(padded, batch, training.sides_of(["hf"], "sft"), [ended("without", rate)])
        for batch, rate in rates.items()
    ]
    found.append(training.Measured(packed, 2, training.sides_of(["with"], "sft"), [ended("with", 480.0)]))
    rows = [row for one in found for row in training.rows_of_point(options, table, one, one.point)]
    times = {row["about"]: row["times"] for row in training.with_ratios(rows)}
    assert times == {"2 rows of 2,048": 3.0, "8 records": 1.0, "16 records": 150 / 160, "4 records": 100 / 160}


def test_trainers_are_compared_on_the_same_batch_without_gradient_norms():
    trials = [ended("with", 300.0, (0.5, 0.404)), ended("trainer", 100.0, (0.5, 0.4))]
    measured = measured_of(TABLES["dpo_full"].cases[0], ["with", "trainer"], trials, "dpo")
    point = measured.point
    said = training.remarks_of(measured, point)
    assert said == ["Largest relative difference of the first 2 losses from TRL, 2 pairs, ligertune: 1.0e-02."]
    assert all(training.is_good(side, point) for side in point.sides)  # only Hugging Face's losses must be ours


def test_a_side_of_ours_with_other_losses_is_not_good():
    trials = [ended("with", 300.0, (0.5, 0.45)), ended("without", 100.0, (0.5, 0.4))]
    point = summarise_trials(trials, sides=[SIDE_OF[trial.side] for trial in trials], label="")
    assert not training.is_good(point.sides[0], point) and training.is_good(point.sides[1], point)


def test_no_side_starts_that_would_exceed_the_budget(monkeypatch, tmp_path, capsys):
    options = options_of(monkeypatch, tmp_path, "tiny", "--small", "--sides", "with", "--budget", "0")
    (found,) = training.measure(options, TABLES["tiny"], deadline=0)
    assert found.trials == [] and found.skipped == [capsys.readouterr().out.strip()]
    assert found.skipped[0] == "Without a row: ligertune (the 0 s of --budget were spent)."


def test_an_unknown_side_or_a_trainer_that_the_task_has_not_is_refused(monkeypatch, tmp_path, capsys):
    for sides in ("with,nobody", "with,trainer"):
        with pytest.raises(SystemExit, match="2"):
            options_of(monkeypatch, tmp_path, "llama", "--sides", sides)
    said = capsys.readouterr().err
    assert "there is no side nobody" in said and "no trainer is known for task sft" in said


def test_a_site_is_looked_up_first_and_only_by_its_side(monkeypatch, tmp_path, capsys):
    site = tmp_path / "site"
    (site / "unsloth").mkdir(parents=True)
    (site / "unsloth" / "__init__.py").write_text("", encoding="utf-8")
    options = options_of(monkeypatch, tmp_path, "peers", "--site", f"unsloth={site}")
    assert options.sites == {"unsloth": site}
    ours, unsloth = training.sides_of(["with", "unsloth"], "sft", options.sites)
    assert (ours.site, unsloth.site, unsloth.missing) == (None, site, None)
    assert training.sides_of(["unsloth"], "sft", {"unsloth": tmp_path})[0].missing == "unsloth"
    path = training.processes.environment(site=site)["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == [str(site), str(ROOT)]
    for wrong in ("with=" + str(site), "unsloth=" + str(tmp_path / "absent"), "unsloth"):
        with pytest.raises(SystemExit, match="2"):
            options_of(monkeypatch, tmp_path, "peers", "--site", wrong)
    said = capsys.readouterr().err
    assert "with runs with the packages of this environment" in said and "there is no folder unsloth" in said


def test_sides_of_one_tool_share_its_site_and_are_measured_for_its_tasks_only(monkeypatch, tmp_path, capsys):
    options = options_of(monkeypatch, tmp_path, "peers", "--site", f"automodel={tmp_path}")
    sides = training.sides_of(["automodel", "automodel_fused"], "sft", options.sites)
    assert [(side.side.label, side.site, side.missing) for side in sides] == [
        ("AutoModel", tmp_path, "nemo_automodel"),
        ("AutoModel, fused loss", tmp_path, "nemo_automodel"),
    ]
    with pytest.raises(SystemExit, match="2"):
        options_of(monkeypatch, tmp_path, "peers_dpo", "--sides", "with,automodel")
    assert "side automodel: it is not measured for task dpo" in capsys.readouterr().err


def test_all_tools_of_peers_are_sides_of_every_row():
    table = TABLES["peers"]
    assert all({"with", "unsloth", "automodel"} <= set(case.sides or table.sides) for case in table.cases)


def test_a_peer_that_refuses_a_row_is_named_with_its_reason_and_has_no_ratio(monkeypatch, tmp_path):
    options = options_of(monkeypatch, tmp_path, "peers")
    names = ["with", "unsloth"]
    refused = Trial("unsloth", 1, 1, (), None, Failure("error", "Unsloth: no such layer"))
    cases = TABLES["peers"].cases
    found = [
        measured_of(cases[0], names, [ended("with", 300.0), ended("unsloth", 200.0)]),
        measured_of(cases[1], names, [ended("with", 500.0), refused]),
    ]
    rows = [row for one in found for row in training.rows_of_point(options, TABLES["peers"], one, one.point)]
    times = [(row["side"], row.get("times")) for row in training.with_ratios(rows)]
    assert times == [("ligertune", 1.5), ("unsloth", 1.0), ("ligertune", None)]
    assert training.reason_of(found[1].point.sides[1]) == "error: Unsloth: no such layer"


def example(*ids):
    return Example(np.array(ids), np.array(ids), "file:1")


def test_packed_rows_of_a_peer_are_one_row_with_the_lengths_of_its_documents():
    batch = batches.joined_rows([[example(1, 2, 3), example(4, 5)], [example(6, 7)]])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "labels": [[-100, 2, 3, -100, 5, -100, 7]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1]],
        "packed_seq_lengths": [3, 2, 2],
    }
    full = batches.joined_rows([[example(1, 2)], [example(3, 4)]])
    assert full["input_ids"].tolist() == full["labels"].tolist() == [[1, 2], [3, 4]] and len(full) == 2


def test_a_step_has_the_sum_of_its_accumulated_losses():
    assert batches.step_losses([torch.tensor(loss) for loss in (1.0, 2.0, 3.0, 4.0)], 2) == [3.0, 7.0]


def test_whole_models_train_on_several_gpus():
    table = training.with_processes(TABLES["llama"], argparse.Namespace(processes=4))
    assert table.page == "whole_model_llama" and table.settings["parallel.strategy"] == "fsdp"
    assert [case.layers for case in table.cases] == [None] and not any("layers" in said for said in table.caveats)


def run(tmp_path, name, *options):
    command = [sys.executable, ROOT / "scripts" / "bench", name, "--small", "--out", tmp_path, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"page": ')]


@pytest.mark.slow
def test_a_small_run_has_a_page_and_equal_losses(tmp_path):
    pages = run(tmp_path, "packed_rows,moe_steps", "--steps", "2", "--sides", "with,hf")
    assert [page["page"] for page in pages] == ["packed_rows_llama_1b_small", "moe_steps_small"]
    for page in pages:
        assert {row["side"] for row in page["rows"]} == {"ligertune", "Hugging Face"}
        assert all(row["tokens_per_second"] > 0 for row in page["rows"]) and "Hugging Face" in page["remarks"][0]


@pytest.mark.slow
def test_whole_models_have_the_losses_of_hugging_face(tmp_path):
    (page,) = run(tmp_path, "full_llama_8b", "--only", "full_8192", "--sides", "with,hf")
    assert [row["about"] for row in page["rows"]] == ["Llama-3-8B, full, 1 x 8,192"] * 2


@pytest.mark.slow
def test_fine_tuning_in_float8_begins_with_trained_weights(tmp_path):
    (page,) = run(tmp_path, "fp8_tuning", "--sides", "with,with-fp8")
    assert {row["side"] for row in page["rows"]} == {"ligertune", "ligertune, fp8"}
    log = (tmp_path / "trained.log").read_text(encoding="utf-8")
    assert (tmp_path / "trained" / "model" / "model.safetensors").is_file() and "20/20" in log
    untrained = 4.1  # of stories260K on these records
    assert page["chart"]["curves"]["ligertune"][0] < untrained - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo_full", "dpo_lora", "distill", "classification", "reward"])
def test_trainers_have_the_losses_of_ligertune(name, tmp_path):
    pytest.importorskip("trl")
    (page,) = run(tmp_path, name, "--sides", "with,trainer,trainer_patched")
    other = {"classification": "Trainer", "reward": "RewardTrainer"}.get(name, "TRL")
    assert {row["side"] for row in page["rows"]} == {"ligertune", other, f"{other}, ligertune kernels"}
    for row in page["rows"]:
        assert row["losses"] == pytest.approx(page["rows"][0]["losses"], rel=1e-4)


STAND_IN = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, set_seed

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class FastLanguageModel:
    def from_pretrained(*, model_name, dtype, **others):
        return AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype), None

    def get_peft_model(model, *, r, lora_alpha, random_state, **others):
        set_seed(random_state)
        return get_peft_model(model, LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=LAYERS))
"""


# A recipe with the interface of AutoModel's, on transformers' model. Its adapter begins with other weights.
STAND_IN_RECIPE = """
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM


def add_adapter(layer, peft):
    layer.lora_A = nn.Linear(layer.in_features, peft["dim"], bias=False)
    layer.lora_B = nn.Linear(peft["dim"], layer.out_features, bias=False)
    scale = peft["alpha"] / peft["dim"]
    layer.register_forward_hook(lambda layer, inputs, out: out + scale * layer.lora_B(layer.lora_A(inputs[0])))


class TrainFinetuneRecipeForNextTokenPrediction:
    def __init__(self, cfg):
        self.cfg = cfg

    def setup(self):
        model = AutoModelForCausalLM.from_pretrained(self.cfg["model"]["pretrained_model_name_or_path"])
        if peft := self.cfg.get("peft"):
            model.requires_grad_(False)
            for name, layer in list(model.named_modules()):
                if name.endswith("_proj"):
                    add_adapter(layer, peft)
        self.model_parts = [model]
        self.max_grad_norm = 1.0

    def run_train_validation_loop(self):
        (model,) = self.model_parts
        trained = [p for p in model.parameters() if p.requires_grad]
        options = self.cfg["optimizer"]
        optimizer = torch.optim.AdamW(trained, lr=options["lr"], weight_decay=options["weight_decay"])
        rows = self.cfg["dataset"]["_target_"]()
        size = self.cfg["step_scheduler"]["global_batch_size"]
        for first in range(0, len(rows), size):
            batch = {name: torch.stack([row[name] for row in rows[first : first + size]]) for name in rows[0]}
            labels = batch.pop("labels")
            if (documents := batch.get("attention_mask")) is not None:
                same = documents[:, :, None] == documents[:, None, :]
                batch["attention_mask"] = same.tril()[:, None]
            loss = cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())
            loss.backward()
            if self.max_grad_norm:
                nn.utils.clip_grad_norm_(trained, self.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            self.log_train_metrics(SimpleNamespace(metrics={"loss": loss.item()}))

    def log_train_metrics(self, log_data):
        pass
"""
# tool -> files of its site
STAND_INS = {
    "unsloth": {"unsloth/__init__.py": STAND_IN},
    "automodel": {
        "nemo_automodel/__init__.py": "",
        "nemo_automodel/components/config/loader.py": "ConfigNode = dict",
        "nemo_automodel/recipes/llm/train_ft.py": STAND_IN_RECIPE,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lora_8b", "full_1b_packed"])
@pytest.mark.parametrize("tool", STAND_INS)
def test_a_peer_trains_the_same_weights_tokens_and_adapter(tool, case, tmp_path):
    """A stand-in with the tool's interface, by transformers and PEFT, has the losses of ligertune."""
    site = tmp_path / "site"
    for name, text in STAND_INS[tool].items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    (page,) = run(tmp_path, "peers", "--only", case, "--sides", f"with,{tool}", "--site", f"{tool}={site}")
    assert len({row["side"] for row in page["rows"]}) == 2
    first, second = (row["losses"] for row in page["rows"])
    assert first == pytest.approx(second, rel=1e-5)
