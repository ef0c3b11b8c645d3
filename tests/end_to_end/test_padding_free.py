"""data.padding_free: micro-batches flattened to (1, sum T) have the losses of padded ones (B, T)."""

import dataclasses
import json
import shutil

import pytest
import torch
from support.command_line import losses
from support.quickstart_runs import ALPACA_ROWS, RESUME, TWO_LAYERS, plan_run, saves, unfinished

from ligertune.attention.choice import FASTER_ON
from ligertune.compare.summary import TOLERANCES
from ligertune.errors import UserError
from ligertune.run import run
from ligertune.training.setup import Job

STEPS = 8
# Without grouping by length, a micro-batch has examples of different lengths. A step has 2 x 4 examples.
UNEVEN = {
    **TWO_LAYERS,
    "train.max_steps": STEPS,
    "train.group_by_length": False,
    "train.per_device_train_batch_size": 4,
    "data.datasets.0.max_samples": 90,
    "eval.per_device_eval_batch_size": 3,
    "model.dtype": "float32",
    "report.warmup_steps": 0,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 512, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def job_of(folder, **changes: object) -> Job:
    return plan_run(folder, **{**UNEVEN, **changes})


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """data.padding_free -> (losses, report, gradient norms) of two runs that differ in nothing else."""
    found = {}
    for padding_free in (False, True):
        folder = tmp_path_factory.mktemp("padding-free" if padding_free else "padded")
        report = run(job_of(folder, **ALPACA_ROWS, **{"data.padding_free": padding_free}), lambda line: None).as_dict()
        found[padding_free] = losses(folder / "run"), report, losses(folder / "run", "grad_norm")
    return found


def test_losses_and_gradient_norms_are_those_of_the_padded_run(both):
    """AdamW's losses alone do not depend on the scale of the gradients."""
    (padded, padded_report, padded_norms), (flat, flat_report, flat_norms) = both[False], both[True]
    assert len(flat) == STEPS
    assert flat == pytest.approx(padded, rel=1e-5) and flat_norms == pytest.approx(padded_norms, rel=1e-4)
    assert flat_report["eval_loss"] == pytest.approx(padded_report["eval_loss"], rel=1e-5)


def test_padding_is_neither_computed_nor_counted_as_tokens(both):
    speed = {padding_free: report["throughput"] for padding_free, (_, report, _) in both.items()}
    assert speed[False]["padding_share"] > 0.15
    assert speed[True]["padding_share"] < 0.015  # padded to a multiple of 16
    ratios = [one["trained_tokens_per_second"] / one["tokens_per_second"] for one in speed.values()]
    assert ratios[0] == pytest.approx(ratios[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"data.streaming": "true", "data.val_split": 0},
        {"train.group_by_length": True, "kernels.enabled": "false", "data.train_on": "all"},
        {"task": "medusa", "data.val_split": 0, "medusa.num_heads": 2, "checkpoint.save_model": "false"},
    ],
    ids=["streamed", "grouped, no kernels", "medusa"],
)
def test_streams_groups_and_medusa_keep_their_losses(changes, tmp_path, monkeypatch):
    monkeypatch.setattr("ligertune.data.batching.order.STREAM_WINDOW", 64)  # 4,096 rows take seconds to read
    found = []
    for value in ("false", "true"):
        job = job_of(tmp_path / value, **{**changes, "train.max_steps": 3, "data.padding_free": value})
        assert job.plan.rows.is_padding_free == (value == "true")
        run(job, lambda line: None)
        found.append(losses(tmp_path / value / "run"))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_padding_free_run_resumes_with_padding(both, tmp_path):
    """The examples of a step do not depend on the key."""
    saving = {**saves(6), "data.padding_free": True}
    run(job_of(tmp_path, **ALPACA_ROWS, **saving), lambda line: None)
    unfinished(tmp_path)  # its newest checkpoint is that of step 6
    run(job_of(tmp_path, **ALPACA_ROWS, **RESUME, **{"data.padding_free": False}), lambda line: None)
    assert losses(tmp_path / "run") == pytest.approx(both[False][0], rel=1e-5)


def gpt_oss(quickstart, folder, padding_free: object) -> Job:
    """Plan a run of a model with attention sinks, which no attention for packed documents supports."""
    shutil.copytree(quickstart / "stories260K", folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(GPT_OSS))
    model = {"model.model_name_or_path": folder / "model", "model.init": "random", "data.padding_free": padding_free}
    return job_of(folder, **model, **{"train.max_steps": 2, "data.val_split": 0})


def test_padding_free_true_is_refused_for_attention_sinks(quickstart, tmp_path):
    with pytest.raises(UserError, match=r"data\.padding_free: .*sinks.* Write data\.padding_free: false"):
        run(gpt_oss(quickstart, tmp_path, True), lambda line: None)


def test_padding_free_auto_falls_back_to_padding_for_attention_sinks(quickstart, tmp_path):
    """The plan is set to what `auto` chooses on a GPU."""
    job = gpt_oss(quickstart, tmp_path / "auto", "auto")
    rows = dataclasses.replace(job.plan.rows, padding_free=True)
    plan = dataclasses.replace(job.plan, rows=rows, attn_implementation="per_document")
    report = run(dataclasses.replace(job, plan=plan), lambda line: None)
    run(gpt_oss(quickstart, tmp_path / "padded", False), lambda line: None)
    assert any("batches are padded: this model has attention sinks" in note for note in report.notes)
    assert losses(tmp_path / "auto" / "run") == losses(tmp_path / "padded" / "run")
    saved = json.loads((tmp_path / "auto" / "run" / "plan.json").read_text())
    assert (saved["attn_implementation"], saved["rows"]["padding_free"]) == ("eager", False)


def test_padding_free_has_no_effect_on_packed_rows(tmp_path):
    plan = job_of(tmp_path, **{"data.packing": True, "data.padding_free": True}).plan
    assert plan.rows.packed and not plan.rows.padding_free
    assert any("data.padding_free has no effect here" in note for note in plan.notes)


ROUNDING = TOLERANCES["bfloat16"]


on_nvidia = pytest.mark.skipif(torch.version.hip is not None, reason="torch's varlen attention is for NVIDIA GPUs")


@pytest.fixture(scope="module")
def gpu_runs(tmp_path_factory):
    """data.padding_free -> (plan, report as a dict, losses)."""
    found = {}
    for value in ("auto", "false"):
        folder = tmp_path_factory.mktemp(value)
        job = job_of(folder, **{"data.padding_free": value, "model.dtype": "bfloat16"})
        report = run(job, lambda line: None).as_dict()
        found[value] = job.plan, report, losses(folder / "run")
    return found


@pytest.mark.gpu
@on_nvidia
def test_auto_chooses_attention_for_packed_documents_and_no_padding(gpu_runs):
    plan, report, _ = gpu_runs["auto"]
    assert plan.attn_implementation == ("document_attention" if plan.machine.arch in FASTER_ON else "varlen")
    assert (plan.rows.padding_free, plan.rows.packed) == (True, False)
    assert report["throughput"]["padding_share"] < 0.015  # padded to a multiple of 16
    plan, report, _ = gpu_runs["false"]
    assert (plan.rows.padding_free, plan.attn_implementation) == (False, "sdpa")
    assert report["throughput"]["padding_share"] > 0.15
    assert not any("padded" in note for note in gpu_runs["auto"][1]["notes"])


@pytest.mark.gpu
@on_nvidia
def test_the_losses_are_those_of_padded_batches_within_bfloat16(gpu_runs):
    flat, padded = gpu_runs["auto"][2], gpu_runs["false"][2]
    assert len(flat) == STEPS
    assert flat[0] == pytest.approx(padded[0], rel=ROUNDING.first_loss)
    assert flat == pytest.approx(padded, rel=ROUNDING.loss)
    assert gpu_runs["auto"][1]["eval_loss"] == pytest.approx(gpu_runs["false"][1]["eval_loss"], rel=ROUNDING.loss)


@pytest.mark.gpu
@on_nvidia
def test_two_runs_are_bit_equal(tmp_path, gpu_runs):
    run(job_of(tmp_path, **{"model.dtype": "bfloat16"}), lambda line: None)
    assert losses(tmp_path / "run") == gpu_runs["auto"][2]
