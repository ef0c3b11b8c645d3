"""Every key of the recipe has its effect on the plan, the training or the files of a run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import losses, metrics
from support.quickstart_runs import ALPACA_ROWS, TWO_LAYERS, plan_run

from ligertune.errors import UserError
from ligertune.recipe import recipe_schema
from ligertune.report import throughput
from ligertune.run import run
from ligertune.training.metrics.meter import Counts


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(changes): losses, plan, report and folder of a run of the quickstart's recipe with these changes."""

    def call(changes: dict[str, object]) -> tuple[list[float], dict, dict, Path]:
        folder = tmp_path_factory.mktemp("run")
        job = plan_run(folder, **changes)
        report = run(job, lambda line: None).as_dict()
        return losses(folder / "run"), job.plan.as_dict(), report, folder / "run"

    return call


@pytest.fixture(scope="module")
def usual(train):
    return train({})


def lengths(data) -> dict[str, int]:
    """Source -> number of tokens, of training and evaluation examples."""
    return {example.source: len(example.input_ids) for part in (data.train, data.eval) for example in part}


def text(data, tokenizer, index: int = 0) -> str:
    return tokenizer.decode(data.train[index].input_ids)


TRUNCATED = {"data.on_overlength": "truncate", "data.max_length": 130, "data.max_dropped": 1}
# key -> (other settings, value, check of the data with the key and without it)
CHANGES_DATA = {
    "data.system_prompt": ({}, "Answer briefly.", lambda new, old, decode: (
        "Answer briefly.\n\nBelow" in decode(new) and "Answer briefly." not in decode(old))),
    "data.prompt_template": ({}, "chat", lambda new, old, decode: (
        "### user:\n" in decode(new) and "### Instruction:\n" in decode(old))),
    "data.train_on": ({}, "all", lambda new, old, decode: (new.train.trained == new.train.lengths - 1).all()),
    "data.roles_to_train": ({"data.prompt_template": "chat"}, "[user]", lambda new, old, decode: (
        new.train[0].labels[-3] == -100 != old.train[0].labels[-3])),  # the last tokens are the answer's
    "data.train_on_eos": ({}, "none", lambda new, old, decode: (
        (new.train.trained == old.train.trained - 1).all() and new.train[0].labels[-1] == -100)),
    "data.max_length": (TRUNCATED, 130, lambda new, old, decode: (
        all(length == min(lengths(old)[source], 130) for source, length in lengths(new).items())
        and 130 in lengths(new).values())),
    "data.on_overlength": ({"data.max_length": 230}, "drop", lambda new, old, decode: (
        lengths(new) == {source: length for source, length in lengths(old).items() if length <= 230} != lengths(old))),
    "data.max_record_bytes": ({"data.max_dropped": 1}, 200, lambda new, old, decode: (
        0 < new.report.dropped["too large"] == old.report.rows_read - len(new.train) - len(new.eval))),
    "data.val_split": ({}, 0.4, lambda new, old, decode: (len(new.train), len(new.eval)) == (24, 16)),
    "data.datasets.0.max_samples": ({}, 20, lambda new, old, decode: len(new.train) + len(new.eval) == 20),
    "data.interleave.probabilities": ({"data.val_split": 0}, "round_robin", lambda new, old, decode: (
        "ends with first_exhausted" in new.report.notes[-1] and not any("ends with" in n for n in old.report.notes))),
    "data.datasets.0.weight": ({"data.val_split": 0}, 1.5, lambda new, old, decode: len(new.train) == 60),
    "train.seed": ({}, 43, lambda new, old, decode: (
        [one.source for one in new.eval] != [one.source for one in old.eval] and len(new.eval) == len(old.eval))),
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGES_DATA)
def test_a_key_has_its_effect_on_the_data(key, tmp_path):
    others, value, holds = CHANGES_DATA[key]
    old = plan_run(tmp_path, **ALPACA_ROWS)
    new = plan_run(tmp_path, **{**ALPACA_ROWS, **others, key: value})
    assert holds(new.data, old.data, lambda data: text(data, old.tokenizer.tokenizer))


def test_model_init_random_and_dtype(train, usual):
    """A random model of 512 tokens has a loss of ln 512 = 6.24."""
    assert train({"model.init": "random"})[0][0] == pytest.approx(6.24, abs=0.15)
    assert usual[0][0] < 5.0
    found, _, _, folder = train({"model.dtype": "bfloat16"})
    assert found != usual[0] and found == pytest.approx(usual[0], rel=2e-2)
    assert {t.dtype for t in load_file(folder / "model" / "model.safetensors").values()} == {torch.bfloat16}


# key -> (value, path in plan.json, value there)
CHANGES_PLAN = {
    "model.attn_implementation": ("eager", ("attn_implementation",), "eager"),
    "model.num_hidden_layers": (2, ("n_parameters",), 123_712),
    "data.padding_free": (True, ("rows", "padding_free"), True),
    "kernels.attention": (True, ("attn_implementation",), "document_attention"),
    "train.tiled_mlp": (True, ("tile",), 4096),
    "train.max_steps": (2, ("schedule", "total_steps"), 2),
    "train.num_train_epochs": (2.0, ("schedule", "total_steps"), 18),
    "train.global_batch_size": (8, ("batching", "accumulation"), 4),
    "train.optim": ("adamw_torch", ("optimizer", "name"), "adamw_torch"),
    "eval.per_device_eval_batch_size": (1, ("batching", "eval_batch_size"), 1),
}


@pytest.mark.parametrize("key", CHANGES_PLAN)
def test_a_key_has_its_effect_on_the_plan(key, tmp_path):
    value, path, expected = CHANGES_PLAN[key]
    others = {"model.num_hidden_layers": {"model.init": "random"}, "kernels.attention": {"data.packing": True},
              "train.tiled_mlp": {"train.gradient_checkpointing": True}}  # fmt: skip
    found = plan_run(tmp_path, **{**others.get(key, {}), key: value}).plan.as_dict()
    for name in path:
        found = found[name]
    assert found == expected


@pytest.mark.parametrize(
    ("key", "value", "kernel", "applied"),
    [
        ("kernels.enabled", "false", "rms_norm", None),
        ("kernels.rope", "false", "apply_rope", 0),
        ("kernels.norm", "false", "rms_norm", 0),
        ("kernels.mlp", "false", "swiglu", 0),
        ("kernels.loss", "cross_entropy", "cross_entropy", 1),
        ("kernels.loss", "torch", "linear_cross_entropy", 0),
        ("kernels.recompute", "true", "recompute", 16),
        ("kernels.recompute", "norms", "recompute", 11),
    ],
)
def test_a_kernels_key_switches_its_kernel(key, value, kernel, applied, tmp_path):
    lines = plan_run(tmp_path, **{key: value}).plan.kernels
    assert {line.kernel: line.applied for line in lines}.get(kernel) == applied


def test_keys_of_memory_and_speed_do_not_change_the_losses(train):
    small = {**TRUNCATED, "model.init": "random", "model.num_hidden_layers": 3, "train.max_steps": 2}
    usual = train(small)[0]
    for changes in (
        {"train.optim": "adamw_torch"},
        {"train.gradient_checkpointing": True},
        {"train.gradient_checkpointing": "offload_gate"},
        {"train.gradient_checkpointing": "offload_both"},
        {"train.gradient_checkpointing": True, "train.gradient_checkpointing_layers": 2, "kernels.recompute": True},
        {"train.gradient_checkpointing": "offload_both", "train.gradient_checkpointing_layers": "auto"},
        {"train.gradient_checkpointing": "offload", "train.tiled_mlp": 64},
        {"kernels.recompute": "norms"},
        {"kernels.attention": True},  # implies padding-free batches
        {"train.per_device_train_batch_size": "auto", "train.global_batch_size": 4},
    ):
        assert train({**small, **changes})[0] == pytest.approx(usual, rel=1e-5)


def test_saves_and_evaluations_by_steps(train):
    _, _, report, folder = train(
        {
            "checkpoint.save_strategy": "steps",
            "checkpoint.save_steps": 1,
            "checkpoint.save_total_limit": 1,
            "eval.eval_strategy": "steps",
            "eval.eval_steps": 2,
        }
    )
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]
    lines = metrics(folder)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 3]
    assert report["eval_loss"] == lines[-1]["eval_loss"]


def test_save_model_false_writes_no_model(train, usual):
    assert Path(usual[2]["model_path"]).is_dir()
    *_, report, folder = train({"checkpoint.save_model": "false"})
    assert report["model_path"] is None and report["status"] == "completed"
    assert not (folder / "model").exists()


def test_saves_and_evaluations_by_epoch(train):
    _, _, _, folder = train(
        {**TWO_LAYERS, "train.num_train_epochs": 2, "checkpoint.save_strategy": "epoch", "eval.eval_strategy": "epoch"}
    )
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-9"]


def test_logging_steps_and_warmup_steps_of_the_report(train, usual):
    _, _, report, folder = train({"logging.logging_steps": 2, "report.warmup_steps": 2})
    lines = [line for line in metrics(folder) if "loss" in line]
    assert [line["step"] for line in lines] == [2, 3]
    assert lines[0]["loss"] == pytest.approx(sum(usual[0][:2]) / 2)
    assert lines[0]["remaining_seconds"] == pytest.approx(lines[0]["seconds"] / 2)  # one of three steps is left
    assert lines[0]["tokens_per_second"] == pytest.approx(lines[0]["tokens"] / lines[0]["seconds"])
    assert (report["throughput"]["steps"], usual[2]["throughput"]["steps"]) == (1, 2)


def test_report_mfu_and_the_rates_of_the_report(tmp_path):
    work = Counts(steps=1, tokens=16, padded_tokens=20, trained_tokens=10, flops=1e12)
    for mfu, expected in (("true", pytest.approx(2.5e-4)), ("false", None)):
        plan = plan_run(tmp_path, **{"report.mfu": mfu, "model.dtype": "bfloat16"}).plan
        two = replace(plan.batching, world_size=2)
        plan = replace(plan, machine=replace(plan.machine, peak_flops=1e15), batching=two)
        assert throughput(plan, work, 2.0, warmup_excluded=False).warmup_steps_excluded == 0
        found = throughput(plan, work, 2.0, warmup_excluded=True)
        assert found.mfu == expected
        rates = found.tokens_per_second, found.padded_tokens_per_second, found.trained_tokens_per_second
        assert (*rates, found.padding_share) == pytest.approx((8, 10, 5, 0.2))


def test_tokenizer_keys(quickstart, tmp_path):
    shutil.copytree(quickstart / "stories260K", tmp_path / "other")
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    keys = {"path": tmp_path / "other", "pad_token": "<s>", "eos_token": "<unk>", "chat_template": tmp_path / "t.jinja"}
    tokenizer = plan_run(tmp_path, **{f"model.tokenizer.{k}": v for k, v in keys.items()}).tokenizer
    assert tokenizer.tokenizer.name_or_path == str(tmp_path / "other")
    assert (tokenizer.tokenizer.pad_token, tokenizer.tokenizer.eos_token) == ("<s>", "<unk>")
    assert tokenizer.tokenizer.chat_template.startswith("{% for m in messages %}{{ m['role'] }}: ")


def test_data_set_keys(tmp_path):
    rows = [{"ask": "Say hi.", "output": "Hi."}, {"ask": "", "output": ""}, {"ask": "Bye?", "output": "Bye."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = {"data.datasets.0.path": tmp_path / "rows.jsonl", "data.val_split": 0}
    with pytest.raises(UserError, match="ask"):
        plan_run(tmp_path, **here)
    renamed = {**here, "data.datasets.0.columns": "{instruction: ask}"}
    assert plan_run(tmp_path, **renamed).plan.data.examples == 2
    with pytest.raises(UserError, match=r"rows\.jsonl:2"):
        plan_run(tmp_path, **renamed, **{"data.datasets.0.on_bad_row": "error"})
    rows.append({"ask": "How many?", "output": 2})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for policy, count in (("drop", 2), ("repair", 3)):
        found = plan_run(tmp_path, **renamed, **{"data.datasets.0.on_bad_row": policy})
        assert found.plan.data.examples == count
    with pytest.raises(UserError, match="sharegpt"):
        plan_run(tmp_path, **renamed, **{"data.datasets.0.format": "sharegpt"})
    evaluated = {**renamed, "data.eval_datasets": f"[{{path: {tmp_path}/rows.jsonl, columns: {{instruction: ask}}}}]"}
    assert plan_run(tmp_path, **evaluated).plan.data.eval_examples == 2


def test_every_key_has_a_test():
    """The tests of tests/recipe only read and write keys."""
    files = [path for path in Path(__file__).parents[1].rglob("*.py") if "recipe" not in path.parts]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    schema = recipe_schema()
    keys = [key for section, spec in schema["properties"].items() for key in leaves(schema, spec, section)]
    keys = [key for key in keys if not key.startswith("data.eval_datasets[]")]
    names = {key: (key.replace("[]", ".0"), f'"{key.split(".")[-1]}"', f"{key.split('.')[-1]}=") for key in keys}
    assert not [key for key, ways in names.items() if not any(way in text for way in ways)]


def leaves(schema: dict, spec: dict, path: str) -> list[str]:
    """Return the keys of a section of the schema, with [] for the items of a list."""
    if "$ref" in spec:
        properties = schema["$defs"][spec["$ref"].split("/")[-1]].get("properties", {})
        return [leaf for name, inner in properties.items() for leaf in leaves(schema, inner, f"{path}.{name}")]
    if "$ref" in spec.get("items", {}):
        return leaves(schema, spec["items"], f"{path}[]")
    return [path]
