"""scripts/bench_published: AutoModel's setting, ratios to its published numbers, and a budget of time."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest
from command_line import ROOT
from script_modules import load_script

from ligertune.compare.side import SIDE_OF
from ligertune.compare.summary import summarise_trials
from ligertune.compare.trial import Failure, Step, Trial


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load_script("bench_published")


@pytest.fixture
def options(tmp_path):
    return Namespace(
        out=tmp_path, small=True, steps=3, warmup=1, global_batch=32, set=[], budget=0, side_names=["with"]
    )


def ended(side: str, rate: float) -> Trial:
    steps = tuple(Step(i, 11.0, None, 100, 100 / rate) for i in (1, 2))
    report = {"throughput": {"tokens_per_second": rate, "mfu": 0.5}, "peak_memory": {"allocated_run": 2**30},
              "kernels": [], "kernels_backend": "triton", "padding_free": False, "fp8": False, "dtype": "bfloat16",
              "batch": ""}  # fmt: skip
    return Trial(side, 1, 1, steps, report, None)


@pytest.mark.parametrize("name", ["lora_llama", "lora_qwen", "lora_4bit", "lora_packed", "full_4096", "full_8192"])
def test_every_table_has_a_valid_recipe_and_loras_are_in_the_published_setting(name, script, options):
    recipe, table = script.recipe_of(options, name), script.TABLES[name]
    train, method = recipe.train, recipe.method
    batch = train.per_device_train_batch_size, train.gradient_accumulation_steps
    assert train.max_steps == 4 and recipe.report.warmup_steps == 1 and table.length in (4096, 8192)
    if table.lora:
        assert (method.lora_r, method.lora_alpha, method.lora_target_modules) == (16, 32, "all-linear")
        assert batch == (2, 16) and train.max_grad_norm == 0 and not train.gradient_checkpointing
    else:
        assert batch[0] * table.length == 8192 and batch[1] == 1 and train.gradient_checkpointing


def test_rows_are_compared_with_hugging_face_and_with_the_published_number(script):
    failed = Trial("liger", 1, 1, (), None, Failure("out of memory", "too much"))
    trials = [ended("with", 300.0), failed, ended("without", 200.0)]
    point = summarise_trials(trials, sides=[SIDE_OF[trial.side] for trial in trials], label="")
    rows = script.rows_of("lora_llama", list(point.sides), published=250.0)
    found = [(row["side"], row["times"], row["published"]) for row in rows]
    assert found == [("ligertune", 1.5, 1.2), (script.PUBLISHED, 1.25, 1.0), ("Hugging Face", 1.0, 0.8)]


def test_no_side_starts_that_would_exceed_the_budget(script, options, capsys):
    trials, left_out = script.measure(options, "lora_llama", deadline=0)
    assert trials == [] and left_out == [capsys.readouterr().out.strip()]
    assert left_out[0].endswith("ligertune, Llama-3-8B, LoRA (the 0 s of --budget were spent).")


def test_runs_of_several_models_make_one_page(script):
    """A newer row replaces an older one, and a row that was measured later is not named as missing."""

    def run(about: str, side: str, rate: float, missing: str) -> dict:
        row = {"about": about, "side": side, "tokens_per_second": rate}
        return {"page": "p", "rows": [row], "caveats": ["Random.", about], "left_out": [missing],
                "remarks": [f"{about}: losses differ by {rate}."], "columns": [["about", "", ""]],
                "command": f"run {about} {rate}"}  # fmt: skip

    ours, hf = "Without a row: ours, B (late).", "Without a row: HF, B (late)."
    pages = [run("A", "ours", 1.0, ours), run("B", "ours", 2.0, hf), run("A", "ours", 3.0, hf)]
    page = script.join_runs(pages)
    assert [(row["about"], row["tokens_per_second"]) for row in page["rows"]] == [("A", 3.0), ("B", 2.0)]
    assert page["left_out"] == [hf] and page["caveats"] == ["Random.", "A", "B"]
    assert page["remarks"] == ["A: losses differ by 3.0.", "B: losses differ by 2.0."]
    assert page["command"] == "run A 1.0; run B 2.0; run A 3.0"


@pytest.mark.slow
def test_the_small_run_has_a_page_and_equal_losses(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_published", "--small", "--only", "lora_packed,full_8192"]
    done = subprocess.run(
        [*command, "--sides", "with,hf", "--out", tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"page": ')]
    assert [page["page"] for page in pages] == ["published_lora_small", "full_llama_8b_small"]
    for page in pages:
        assert {row["side"] for row in page["rows"]} == {"ligertune", "Hugging Face"}
        assert all(row["tokens_per_second"] > 0 for row in page["rows"]) and "at most" in page["remarks"][0]
