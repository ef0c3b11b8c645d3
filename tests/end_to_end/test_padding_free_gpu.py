"""`data.padding_free: auto` on a GPU: no padding, and the losses of padded batches."""

from __future__ import annotations

import pytest
import torch
from command_line import losses
from test_padding_free import STEPS, job_of

from ligertune.attention.choice import FASTER_ON
from ligertune.compare.parity import TOLERANCES
from ligertune.run import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.hip is not None, reason="torch's varlen attention is for NVIDIA GPUs"),
]
ROUNDING = TOLERANCES["bfloat16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """data.padding_free -> (plan, report as a dict, losses)."""
    found = {}
    for value in ("auto", "false"):
        folder = tmp_path_factory.mktemp(value)
        job = job_of(folder, **{"data.padding_free": value, "model.dtype": "bfloat16"})
        report = run(job, lambda line: None).as_dict()
        found[value] = job.plan, report, losses(folder / "run")
    return found


def test_auto_chooses_attention_for_packed_documents_and_no_padding(runs):
    plan, report, _ = runs["auto"]
    assert plan.attn_implementation == ("document_attention" if plan.machine.arch in FASTER_ON else "varlen")
    assert (plan.rows.padding_free, plan.rows.packed) == (True, False)
    assert report["throughput"]["padding_share"] < 0.015  # padded to a multiple of 16
    plan, report, _ = runs["false"]
    assert (plan.rows.padding_free, plan.attn_implementation) == (False, "sdpa")
    assert report["throughput"]["padding_share"] > 0.15
    assert not any("padded" in note for note in runs["auto"][1]["notes"])


def test_the_losses_are_those_of_padded_batches_within_bfloat16(runs):
    flat, padded = runs["auto"][2], runs["false"][2]
    assert len(flat) == STEPS
    assert flat[0] == pytest.approx(padded[0], rel=ROUNDING.first_loss)
    assert flat == pytest.approx(padded, rel=ROUNDING.loss)
    assert runs["auto"][1]["eval_loss"] == pytest.approx(runs["false"][1]["eval_loss"], rel=ROUNDING.loss)


def test_two_runs_are_bit_equal(tmp_path, runs):
    run(job_of(tmp_path, **{"model.dtype": "bfloat16"}), lambda line: None)
    assert losses(tmp_path / "run") == runs["auto"][2]
