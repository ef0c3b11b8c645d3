"""data.padding_free: examples behind one another instead of padding. The shape changes, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from command_line import losses
from test_keys import read
from torch import nn

from ligertune.errors import UserError
from ligertune.run import plan_for, run
from ligertune.train.job import Job

STEPS = 8
# as shuffled, the lengths in a batch are uneven; 2 x 4 examples a step
UNEVEN = {
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


def job_of(quickstart, folder, **changes: object) -> Job:
    return plan_for(read(quickstart, folder, **{**UNEVEN, **changes}))


@pytest.fixture(scope="module")
def both(quickstart, tmp_path_factory):
    """padding_free -> (losses, report), of runs that differ in nothing else."""
    found = {}
    for way in (False, True):
        folder = tmp_path_factory.mktemp("padding-free" if way else "padded")
        report = run(job_of(quickstart, folder, **{"data.padding_free": way}), lambda line: None).as_dict()
        found[way] = losses(folder / "run"), report
    return found


def test_every_loss_is_that_of_the_padded_run(both):
    (padded, padded_report), (joined, joined_report) = both[False], both[True]
    assert len(joined) == STEPS
    assert joined == pytest.approx(padded, rel=1e-5)
    assert joined_report["eval_loss"] == pytest.approx(padded_report["eval_loss"], rel=1e-5)


def test_no_padding_is_computed_or_counted_as_tokens(both):
    speed = {way: report["throughput"] for way, (_, report) in both.items()}
    assert speed[False]["padding_share"] > 0.15
    assert speed[True]["padding_share"] < 0.015  # what is left of a multiple of 16
    ratios = [one["trained_tokens_per_second"] / one["tokens_per_second"] for one in speed.values()]
    assert ratios[0] == pytest.approx(ratios[1])


def gradients(quickstart, folder, *, padding_free: bool) -> dict[str, torch.Tensor]:
    """Those of the first step, over both of its micro batches."""
    found = {}

    def watch(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: found.__setitem__(name, p.grad.detach().clone())
            )

    settings = {"data.padding_free": padding_free, "train.max_steps": 1, "data.val_split": 0}
    run(job_of(quickstart, folder, **settings), lambda line: None, change=watch)
    return found


def test_the_first_gradients_are_those_of_padded_batches(quickstart, tmp_path):
    padded, joined = (gradients(quickstart, tmp_path / str(way), padding_free=way) for way in (False, True))
    assert padded.keys() == joined.keys() and len(padded) > 40
    for name, expected in padded.items():
        torch.testing.assert_close(joined[name], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()), msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"data.streaming": "true", "data.val_split": 0},
        {"train.group_by_length": True, "kernels.enabled": "false", "data.train_on": "all"},
        {"task": "medusa", "data.val_split": 0, "medusa.num_heads": 2, "checkpoint.save_model": "false"},
    ],
    ids=["streamed", "grouped, no kernels", "medusa"],
)
def test_other_ways_to_train_keep_their_losses_too(changes, quickstart, tmp_path):
    found = []
    for way in ("false", "true"):
        job = job_of(quickstart, tmp_path / way, **{**changes, "train.max_steps": 3, "data.padding_free": way})
        assert job.plan.rows.is_padding_free == (way == "true")
        run(job, lambda line: None)
        found.append(losses(tmp_path / way / "run"))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_checkpoint_is_continued_either_way(both, quickstart, tmp_path):
    """Which examples a step has does not depend on it."""
    saving = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 6, "data.padding_free": True}
    run(job_of(quickstart, tmp_path, **saving), lambda line: None)
    (tmp_path / "run" / "report.json").unlink()  # as if it had been killed after step 6
    resumed = {"data.padding_free": False, "checkpoint.resume_from_checkpoint": "auto"}
    run(job_of(quickstart, tmp_path, **resumed), lambda line: None)
    assert losses(tmp_path / "run") == pytest.approx(both[False][0], rel=1e-5)


def leaking(quickstart, folder, padding_free: object) -> Job:
    """The job of a model that has attention sinks, which rows of several documents have no attention for."""
    shutil.copytree(quickstart / "stories260K", folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(GPT_OSS))
    model = {"model.model_name_or_path": folder / "model", "model.init": "random", "data.padding_free": padding_free}
    return job_of(quickstart, folder, **model, **{"train.max_steps": 2, "data.val_split": 0})


def test_a_model_that_cannot_is_refused_where_it_was_asked_for(quickstart, tmp_path):
    with pytest.raises(UserError, match=r"data\.padding_free: .*sinks.* Write data\.padding_free: false"):
        run(leaking(quickstart, tmp_path, True), lambda line: None)


def test_a_model_that_cannot_is_padded_where_it_was_not(quickstart, tmp_path):
    """auto joins on a GPU only: here the plan is made to say what it would there."""
    for name in ("auto", "padded"):
        (tmp_path / name).mkdir()
    job = leaking(quickstart, tmp_path / "auto", "auto")
    rows = dataclasses.replace(job.plan.rows, padding_free=True)
    plan = dataclasses.replace(job.plan, rows=rows, attn_implementation="per_document")
    report = run(dataclasses.replace(job, plan=plan), lambda line: None)
    run(leaking(quickstart, tmp_path / "padded", False), lambda line: None)
    assert any("batches are padded: this model has attention sinks" in note for note in report.notes)
    assert losses(tmp_path / "auto" / "run") == losses(tmp_path / "padded" / "run")
    said = json.loads((tmp_path / "auto" / "run" / "plan.json").read_text())
    assert (said["attn_implementation"], said["rows"]["padding_free"]) == ("eager", False)


def test_packed_rows_have_no_padding_to_be_free_of(quickstart, tmp_path):
    plan = job_of(quickstart, tmp_path, **{"data.packing": True, "data.padding_free": True}).plan
    assert plan.rows.packed and not plan.rows.padding_free
    assert any("data.padding_free has no effect here" in note for note in plan.notes)
