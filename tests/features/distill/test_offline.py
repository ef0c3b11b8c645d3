"""Training from a teacher's written log-probabilities."""

import json

import numpy as np
import pytest
import torch
from support.command_line import RECIPE, metrics, overrides, run_here
from support.forked_ranks import on_ranks
from support.quickstart_runs import SHORT, plan_run
from support.tasks.distill_runs import TEACHER, distil, distill_settings, save_student, values

from ligertune.errors import UserError
from ligertune.features.distill.divergence import Divergence
from ligertune.features.distill.offline_task import StoredLoss
from ligertune.features.output_head import LogitTransform
from ligertune.features.task import Measures

V, X = 512, -100


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_student(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def written(student, tmp_path_factory):
    """written(top_k): the folder of `ligertune distill --write`, and what the command printed."""
    made = {}

    def write(top_k: int):
        if top_k not in made:
            folder = tmp_path_factory.mktemp("written")
            settings = {**SHORT, **distill_settings(student), "distill.top_k": top_k}
            settings |= {"train.num_train_epochs": "null", "checkpoint.output_dir": folder / "unused"}
            arguments = ["distill", RECIPE, "--write", folder / "file", *overrides(settings), "--json"]
            done = run_here(*arguments, cwd=folder)
            assert done.code == 0, done.err
            made[top_k] = folder / "file", json.loads(done.out)
        return made[top_k]

    return write


OFFLINE = {"distill.loss": "forward_kl", "eval.eval_strategy": "steps", "eval.eval_steps": 3}


def test_the_whole_vocabulary_gives_the_losses_of_the_teacher_itself(student, written, tmp_path):
    online = distil(tmp_path / "online", student, **OFFLINE)
    file, said = written(V)
    assert said["top_k"] == V and said["teacher"] == str(TEACHER)
    for name, changes in (
        ("offline", {}),
        ("no kernels", {"kernels.enabled": False}),
        ("free", {"data.padding_free": True}),
    ):
        settings = {**OFFLINE, "distill.teacher": "null", "distill.teacher_file": file, **changes}
        offline = distil(tmp_path / name, student, **settings)
        for key in ("loss", "kl", "grad_norm", "eval_loss", "eval_kl"):
            assert values(offline, key) == pytest.approx(values(online, key), rel=2e-5), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_read_as_one_process(strategy, student, written, tmp_path):
    settings = {**OFFLINE, "distill.teacher_file": written(64)[0]}
    alone = distil(tmp_path / "alone", student, **settings)
    settings |= {"parallel.strategy": strategy, "train.gradient_accumulation_steps": 1}
    on_ranks(2, lambda rank: distil(tmp_path / "ranks", student, **settings) and None)
    ranks = metrics(tmp_path / "ranks" / "run")
    for key in ("loss", "grad_norm", "eval_kl"):
        assert values(ranks, key) == pytest.approx(values(alone, key), rel=1e-5)


def test_few_tokens_give_a_lower_bound(student, written, tmp_path):
    losses = []
    for top_k in (4, 64, V):
        settings = {
            **OFFLINE,
            "distill.teacher_file": written(top_k)[0],
            "train.max_steps": 1,
            "distill.sft_weight": 0.5,
        }
        lines = distil(tmp_path / str(top_k), student, **settings)
        losses.append(values(lines, "kl")[0])
        assert values(lines)[0] == pytest.approx((losses[-1] + values(lines, "sft_loss")[0]) / 2, rel=1e-5)
    assert losses[0] < losses[1] < losses[2]


def test_the_loss_of_kept_tokens_and_the_rest_against_the_definition(monkeypatch):
    monkeypatch.setattr("ligertune.features.distill.offline_task.CHUNK_ROWS", 5)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((12, 8), (30, 8)))
    labels = torch.randint(30, (12,))
    labels[::4] = X
    kept = labels != X
    q = torch.randn(12, 30, dtype=torch.float64).softmax(-1)[kept]
    top, ids = q.topk(6)
    p = (hidden @ weight.T / 1.5).softmax(-1)[kept]
    chosen, rest, rest_of_student = p.gather(-1, ids), 1 - top.sum(-1), 1 - p.gather(-1, ids).sum(-1)
    wanted = ((top * (top / chosen).log()).sum() + (rest * (rest / rest_of_student).log()).sum()) / 7
    loss = StoredLoss(Divergence(0.0, 1.5), ids, top.log(), Measures(("kl",)))
    options = {"logit_scale": 1.0, "softcap": None, "num_items_in_batch": 7, "labelled_rows": None}
    found = loss.fused(hidden, weight, None, labels, options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    dense = loss.dense(LogitTransform().logits(hidden @ weight.T), labels, 7)
    torch.testing.assert_close(dense, wanted, rtol=1e-9, atol=0)
    right = torch.autograd.grad(wanted, (hidden, weight))
    for gradient, expected in zip(torch.autograd.grad(found, (hidden, weight)), right, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_a_file_that_does_not_fit_is_one_sentence(student, written, tmp_path):
    file, _ = written(4)
    base = {"distill.loss": "forward_kl", "distill.teacher_file": file}
    for changes, words in (
        ({"distill.temperature": 2.0}, "it was written with distill.temperature: 1.0"),
        ({"distill.teacher": student}, f"its teacher is {TEACHER}"),
        ({"data.datasets.0.max_samples": 30}, "it was written for other data"),
        ({"train.seed": 7}, "it was written for other data, another tokenizer or another seed"),
        ({"distill.teacher_file": tmp_path}, "holds no complete log-probabilities"),
    ):
        with pytest.raises(UserError, match="^distill.teacher_file: .*" + words):
            plan_run(tmp_path, **distill_settings(student, **{**base, **changes}))
    assert np.load(file / "train_ids.npy").shape[1] == 4


def test_a_folder_that_holds_something_is_not_written_over(student, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("text", encoding="utf-8")
    arguments = overrides({**SHORT, **distill_settings(student), "train.num_train_epochs": "null"})
    done = run_here("distill", RECIPE, "--write", tmp_path / "full", *arguments, cwd=tmp_path)
    assert done.code == 2 and "is not an empty folder" in done.err


def test_without_write_the_command_trains(student, tmp_path):
    settings = {**SHORT, **distill_settings(student), "train.num_train_epochs": "null", "train.max_steps": 1}
    del settings["task"]
    done = run_here(
        "distill", RECIPE, *overrides({**settings, "checkpoint.output_dir": tmp_path / "run"}), cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert len(values(metrics(tmp_path / "run"), "kl")) == 1
