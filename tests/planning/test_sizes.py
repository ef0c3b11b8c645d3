"""Sizes of a recipe are bounded by the data and by memory, before anything is allocated."""

import json
import time
from dataclasses import replace

import pytest
from support.command_line import ROOT, overrides, run_here
from support.quickstart_runs import recipe_for

from ligertune.errors import UserError
from ligertune.planning.batch_layout import Batching, Rows, choose_batching
from ligertune.planning.make_plan import MAX_REPEATS, check_host_memory, repeated_rows
from ligertune.recipe import load_recipe
from ligertune.training.resolve import plan_for

RECIPE = f"""\
model: {{model_name_or_path: {ROOT}/configs/quickstart/stories260K, dtype: float32}}
data: {{datasets: [{{path: d.jsonl}}], max_length: 256, packing: false}}
train: {{max_steps: 1, per_device_train_batch_size: 2, learning_rate: 1.0e-3}}
checkpoint: {{output_dir: out, overwrite: true}}
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    row = {"prompt": "Hi.", "completion": "Hello."}
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    return tmp_path


BILLION = 10**9
TOO_LARGE = (
    {"train.per_device_train_batch_size": BILLION},
    {"train.gradient_accumulation_steps": BILLION},
    {"train.global_batch_size": BILLION},
    {"train.per_device_train_batch_size": 60_000},
    {"train.gradient_accumulation_steps": 60_000},
    {"train.gradient_accumulation_steps": 65_000, "train.per_device_train_batch_size": 65_000, "data.streaming": True},
    {"eval.per_device_eval_batch_size": BILLION},
    {"train.num_train_epochs": 1e18, "train.max_steps": "null"},
    {"train.num_train_epochs": 1e308, "train.max_steps": "null"},
    {"train.num_train_epochs": 1e6, "train.max_steps": "null", "train.per_device_train_batch_size": 60_000},
    {"train.warmup_steps": BILLION},
    {"task": "medusa", "medusa.num_layers": BILLION},
    {"task": "medusa", "medusa.eval_new_tokens": BILLION},
    {"parallel.timeout": 10**15},
    {"parallel.num_processes": BILLION},
    {"vision.image_min_pixels": 10**15},
    {"report.profile_steps": BILLION},
    {"method.type": "lora", "method.lora_r": BILLION},
    {"method.type": "lora", "method.trainable_token_indices": [30_000_000]},
    {"data.num_proc": BILLION},
    {"data.max_length": 10**12},
)


@pytest.mark.parametrize("settings", TOO_LARGE, ids=str)
def test_a_size_without_bound_is_refused_in_one_sentence(settings, place):
    start = time.monotonic()
    done = run_here("train", "r.yaml", *overrides(settings), cwd=place)
    assert time.monotonic() - start < 20  # a second on a free machine
    assert done.code == 2 and done.err.count("Error: ") == 1 and "Traceback" not in done.err, done.err
    assert set(settings) & {word.strip("=:,") for word in done.err.replace("=", " ").split()}, done.err
    assert not (place / "out").exists()


def test_a_batch_of_more_rows_than_the_data_is_told_or_refused(tmp_path):
    recipe = recipe_for(tmp_path, **{"train.max_steps": 2})
    rows = Rows("shuffled", 8, 512, 1, None)

    def batch(size: int) -> Batching:
        return Batching(size, 1, 1, 4)

    assert repeated_rows(recipe, rows, batch(8)) == ()
    [note] = repeated_rows(recipe, rows, batch(9))
    assert "a step has 9 rows" in note and "the data 8 rows" in note and "more than once" in note
    assert repeated_rows(recipe, rows, batch(8 * MAX_REPEATS))
    with pytest.raises(UserError, match=r"a step has 801 rows .* to 8 rows in a step\."):
        repeated_rows(recipe, rows, batch(8 * MAX_REPEATS + 1))


def test_a_model_that_no_host_memory_holds_is_refused_before_it_is_made(place):
    plan = plan_for(load_recipe(place / "r.yaml", [f"checkpoint.output_dir={place / 'out'}"])).plan
    check_host_memory(plan)
    small = replace(plan, machine=replace(plan.machine, memory_bytes=plan.bytes.total - 1))
    with pytest.raises(UserError, match=r"need 4\.0 MiB, and this host has 4\.0 MiB"):
        check_host_memory(small)
    check_host_memory(replace(small, machine=replace(small.machine, device="cuda")))  # torch says it there


def test_epochs_end_before_a_step_repeats_the_data(tmp_path):
    recipe = recipe_for(tmp_path, **{"train.max_steps": "null", "train.num_train_epochs": 1})
    assert repeated_rows(recipe, Rows("shuffled", 8, 512, 1, None), Batching(60_000, 1, 1, 4)) == ()


def test_the_rows_of_a_step_are_bounded_over_all_processes(tmp_path):
    recipe = recipe_for(
        tmp_path, **{"train.per_device_train_batch_size": 2**14, "train.gradient_accumulation_steps": 1}
    )
    assert choose_batching(recipe, 64).global_batch_size == 2**20
    with pytest.raises(UserError, match="1,064,960 rows in a step"):
        choose_batching(recipe, 65)


@pytest.mark.parametrize("arguments", [("plan", "r.yaml", "--memory", "1e300"),
                                       ("generate", "m", "Hi.", "--max-new-tokens", 10**18)], ids=str)  # fmt: skip
def test_a_size_on_the_command_line_has_a_bound(arguments, place):
    done = run_here(*arguments, cwd=place)
    assert done.code == 2 and "Traceback" not in done.err and arguments[-2] in done.err


OUT_OF_MEMORY = (
    MemoryError(),
    MemoryError("Unable to allocate 7.3 TiB for an array"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 268435456 bytes."),
)


@pytest.mark.parametrize("problem", OUT_OF_MEMORY, ids=str)
def test_host_memory_that_is_not_there_is_one_sentence(problem, place, monkeypatch):
    import ligertune.cli.app as app

    def fail() -> None:
        raise problem

    monkeypatch.setattr(app, "app", fail)
    done = run_here("plan", "r.yaml", cwd=place)
    assert done.code == 1 and done.err.startswith("Error: The host ran out of memory") and "Traceback" not in done.err
