"""Distillation from a model and from files against distributions by hand."""

import json
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from ligertune_kernels import LinearLora
from support.forked_ranks import on_ranks
from support.models import tiny_models
from support.quickstart_runs import plan_run
from support.tasks.distill_runs import TEACHER, distill_settings, save_student
from transformers import AutoModelForCausalLM

from ligertune.data.batching.collate import Batcher
from ligertune.data.examples import Examples
from ligertune.errors import UserError
from ligertune.features.distill.distill_task import DistillTask
from ligertune.features.distill.divergence import DistillLoss, Divergence, TeacherHead
from ligertune.features.distill.offline_task import OfflineDistillTask, StoredLoss
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.distill.teacher import load_teacher
from ligertune.features.distill.teacher_files import StoredTeacher, TeacherFile, write_teacher_file
from ligertune.features.output_head import LogitTransform, logit_transform
from ligertune.features.task import Measures, Task
from ligertune.launcher.signals import StopRequest
from ligertune.patching.fused_loss import let_head_losses_run
from ligertune.patching.patch import patch
from ligertune.training.evaluate import evaluate

X, V, K, T, CPU = -100, 512, 5, 2.5, torch.device("cpu")


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * (a.log() - b.log())).sum(-1)


def divergence_of(loss: str, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return that of the student's p from the teacher's q. jsd: with beta 0.25, q's share of the mixture."""
    mixture = 0.25 * q + 0.75 * p
    jsd = 0.25 * kl(q, mixture) + 0.75 * kl(p, mixture)
    return {"forward_kl": kl(q, p), "reverse_kl": kl(p, q), "jsd": jsd}[loss]


def grouped(q: torch.Tensor, p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the forward KL of the tokens `ids` and of all others as one."""
    (q, rest), (p, rest_p) = ((x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1)) for x in (q, p))
    return kl(q, p) + rest * (rest / rest_p).log()


def test_logits_are_scaled_and_then_capped():
    z = torch.tensor([0.0, 2.0, -6.0])
    assert LogitTransform(0.5).logits(z).tolist() == [0.0, 1.0, -3.0]
    wanted = [0.0, 4 * np.tanh(0.25), -4 * np.tanh(0.75)]
    assert LogitTransform(0.5, 4.0).logits(z).tolist() == pytest.approx(wanted, rel=1e-6)
    assert LogitTransform(0.5, 4.0).logits(z.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "transform"),
    [("llama", (1.0, None)), ("granite", (0.25, None)), ("cohere2", (0.0625, None)), ("gemma2", (1.0, 3.0))],
)
def test_the_scale_and_the_cap_of_a_model_are_those_of_its_configuration(family, transform):
    model = tiny_models.make(family)
    assert logit_transform(model) == LogitTransform(*transform) and model.training


# (student's transform, teacher's transform): the kernel takes the first two, the others make logits in chunks
HEADS = {
    "plain": (LogitTransform(), LogitTransform()),
    "scales": (LogitTransform(0.5), LogitTransform(0.25)),
    "odd scales": (LogitTransform(0.3), LogitTransform(0.7)),
    "caps": (LogitTransform(1.0, 3.0), LogitTransform(0.5, 2.0)),
}


def head_tensors() -> dict[str, torch.Tensor]:
    """Return hidden states of 10 tokens and heads with 14 and 12 tokens; the student's has a bias and an adapter."""
    torch.manual_seed(1)
    shapes = {"hidden": (10, 6), "weight": (14, 6), "bias": (14,), "lora_a": (2, 6), "lora_b": (14, 2)}
    shapes |= {"taught": (10, 8), "taught_weight": (12, 8)}
    found = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    found["labels"] = torch.tensor([3, X, 0, 11, 2, X, 5, 5, X, 9])
    return found


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("heads", HEADS)
def test_the_loss_of_a_head_with_a_bias_and_an_adapter(heads, loss):
    """The temperature divides the logits of both models in the divergence, and none in the cross-entropy."""
    (student, teacher), of = HEADS[heads], head_tensors()
    how = Divergence.of(DistillSpec(loss=loss, beta=0.25, temperature=1.6, sft_weight=0.3))
    z = of["hidden"] @ (of["weight"] + 0.5 * of["lora_b"] @ of["lora_a"]).T + of["bias"]
    logits, kept = student.logits(z), of["labels"] != X
    p = (logits[:, :12] / 1.6).softmax(-1)[kept]
    q = (teacher.logits(of["taught"] @ of["taught_weight"].T) / 1.6).softmax(-1)[kept]
    total, sft = divergence_of(loss, q, p).sum(), F.cross_entropy(logits, of["labels"], reduction="sum")
    options = {"logit_scale": student.logit_scale, "softcap": student.softcap, "num_items_in_batch": 20}
    options |= {"lora": LinearLora(of["lora_a"], of["lora_b"], 0.5), "labelled_rows": None}
    options["ignore_index"] = X
    for rows in (None, kept.nonzero().flatten()):
        measures = Measures(how.measures)
        made = DistillLoss(how, TeacherHead(of["taught_weight"], teacher), of["taught"], measures)
        given = {**options, "labelled_rows": rows}
        found = made.fused(of["hidden"], of["weight"], of["bias"], of["labels"], given)
        assert float(found) == pytest.approx(float(0.7 * total + 0.3 * sft) / 20, rel=1e-9)
        assert made.ran and made.in_chunks == (heads in ("odd scales", "caps"))
        wanted = {"kl": float(total) / 7, "sft_loss": float(sft) / 7}
        assert measures.means(measures.take()) == pytest.approx(wanted, rel=1e-6)
    dense = made.dense(logits, of["labels"], None)  # divided by the number of labels
    assert float(dense) == pytest.approx(float(0.7 * total + 0.3 * sft) / 7, rel=1e-9)


@pytest.mark.parametrize("heads", ["plain", "odd scales", "caps"])
@pytest.mark.parametrize("top_k", [4, 14], ids=["few", "all"])
def test_the_loss_of_stored_log_probabilities(heads, top_k, monkeypatch):
    monkeypatch.setattr("ligertune.features.distill.offline_task.CHUNK_ROWS", 4)
    (student, _), of = HEADS[heads], head_tensors()
    how = Divergence.of(DistillSpec(loss="forward_kl", temperature=1.6, sft_weight=0.3))
    z = of["hidden"] @ (of["weight"] + 0.5 * of["lora_b"] @ of["lora_a"]).T + of["bias"]
    logits, kept = student.logits(z), of["labels"] != X
    q = torch.randn(7, 14, dtype=torch.float64).softmax(-1)
    p, (top, ids) = (logits / 1.6).softmax(-1)[kept], q.topk(top_k)
    total = (kl(q, p) if top_k == 14 else grouped(q, p, ids)).sum()
    sft = F.cross_entropy(logits, of["labels"], reduction="sum")
    options = {"logit_scale": student.logit_scale, "softcap": student.softcap, "num_items_in_batch": 20}
    options |= {"lora": LinearLora(of["lora_a"], of["lora_b"], 0.5), "ignore_index": X}
    for rows in (None, kept.nonzero().flatten()):
        measures = Measures(how.measures)
        made = StoredLoss(how, ids, top.log(), measures)
        given = {**options, "labelled_rows": rows}
        found = made.fused(of["hidden"], of["weight"], of["bias"], of["labels"], given)
        assert float(found) == pytest.approx(float(0.7 * total + 0.3 * sft) / 20, rel=1e-9)
        wanted = {"kl": float(total) / 7, "sft_loss": float(sft) / 7}
        assert measures.means(measures.take()) == pytest.approx(wanted, rel=1e-6)
    dense = made.dense(logits, of["labels"], None)
    assert float(dense) == pytest.approx(float(0.7 * total + 0.3 * sft) / 7, rel=1e-9)


# Whole models: the bundled teacher with dropout in its attention, and a random student.


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    model = AutoModelForCausalLM.from_pretrained(TEACHER, attention_dropout=0.5)
    model.save_pretrained(folder / "teacher")
    for file in TEACHER.glob("*token*"):
        (folder / "teacher" / file.name).write_bytes(file.read_bytes())
    return {"teacher": folder / "teacher", "student": save_student(folder / "student"), "file": folder / "file"}


def settings(folders: dict[str, Path], **changes: object) -> dict[str, object]:
    names = {
        "distill.teacher": folders["teacher"], "distill.loss": "forward_kl", "distill.temperature": T,
        "distill.top_k": K, "distill.sft_weight": 0.3, "data.datasets.0.max_samples": 12, "data.val_split": 0.25,
    }  # fmt: skip
    return distill_settings(folders["student"], **{**names, **changes})


@pytest.fixture(scope="module")
def job(folders, tmp_path_factory):
    return plan_run(tmp_path_factory.mktemp("plan"), **settings(folders))


@pytest.fixture(scope="module")
def written(job, folders) -> Path:
    tokens = {"pad_token_id": job.tokenizer.pad_token_id, "vocab_size": V}
    write_teacher_file(job.plan, job.data, folders["file"], **tokens, show=lambda line: None)
    return folders["file"]


@torch.no_grad()
def logits_of(folder: Path, examples: Examples) -> list[torch.Tensor]:
    """Return transformers' logits of the labelled tokens of each example, alone and in evaluation mode, float64."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for example in examples:
        ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in (example.input_ids, example.labels))
        found.append(model(input_ids=ids[None]).logits[0, :-1][labels[1:] != X].double())
    return found


@pytest.fixture(scope="module")
def by_hand(job, folders) -> dict[str, list[torch.Tensor]]:
    """Return logits of the training examples: of the teacher and of the student; and their labels."""
    found = {name: logits_of(folders[name], job.data.train) for name in ("teacher", "student")}
    labels = [torch.from_numpy(example.labels[1:].astype(np.int64)) for example in job.data.train]
    return {**found, "labels": [row[row != X] for row in labels]}


def test_a_teacher_is_frozen_and_has_no_dropout(job, folders, by_hand):
    teacher, examples = load_teacher(job.plan, CPU), job.data.train
    batch = Batcher(examples, False, 1, 0, False, CPU)([np.array([2])])
    hidden = teacher.hidden_states({**batch, "num_items_in_batch": 3})
    kept = F.pad(batch["labels"], (0, 1), value=X)[0, 1:] != X
    found = teacher.head.logits(hidden, V)[kept].double()
    torch.testing.assert_close(found, by_hand["teacher"][2], rtol=1e-4, atol=1e-4)
    assert not teacher.head.weight.requires_grad and not hidden.requires_grad


@pytest.mark.parametrize(("wanted", "dtype"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_a_teacher_has_the_dtype_of_the_student_or_of_the_recipe(wanted, dtype, folders, tmp_path):
    plan = plan_run(tmp_path, **settings(folders, **{"distill.teacher_dtype": wanted})).plan
    assert plan.teacher.dtype == dtype
    assert load_teacher(plan, CPU).head.weight.dtype == getattr(torch, dtype)


def test_a_written_file_holds_the_largest_log_probabilities_at_each_labelled_token(job, written, by_hand):
    """At the recipe's temperature, of the examples in their order, which is not that of their lengths."""
    description = json.loads((written / "teacher.json").read_text())
    assert (description["temperature"], description["top_k"], description["vocab_size"]) == (T, K, V)
    lengths = job.data.train.lengths.tolist()
    assert lengths != sorted(lengths) and lengths != sorted(lengths, reverse=True)
    wanted = [(logits / T).log_softmax(-1).topk(K) for logits in by_hand["teacher"]]
    log_probs, ids = np.load(written / "train_log_probs.npy"), np.load(written / "train_ids.npy")
    np.testing.assert_allclose(log_probs, np.concatenate([top.values for top in wanted]), atol=2e-5)
    assert (ids == np.concatenate([top.indices for top in wanted])).mean() > 0.99  # two may be equally probable
    stored = StoredTeacher(written, "train", job.data.train)
    for indices in ([3, 0], [len(wanted) - 1]):
        found_ids, found = stored.of(indices)
        np.testing.assert_allclose(found, np.concatenate([wanted[i].values for i in indices]), atol=2e-5)
        assert found_ids.shape == found.shape and found_ids.dtype == torch.int64
    for name, examples in (("train", job.data.train), ("eval", job.data.eval)):
        assert len(np.load(written / f"{name}_ids.npy")) == examples.trained.sum()


def test_a_longer_teacher_is_written_without_its_padding(job, by_hand, tmp_path):
    """The student has 300 tokens, and the file all of them for a larger K."""
    plan = replace(job.plan, build=job.plan.build.with_section(DistillSpec, top_k=400))
    folder = tmp_path / "file"
    found = write_teacher_file(plan, job.data, folder, pad_token_id=0, vocab_size=300, show=lambda line: None)
    assert (found.top_k, found.vocab_size) == (300, 300)
    ids, log_probs = np.load(folder / "eval_ids.npy"), np.load(folder / "eval_log_probs.npy")
    assert (np.sort(ids, 1) == np.arange(300)).all()
    np.testing.assert_allclose(np.exp(log_probs).sum(1), 1.0, rtol=1e-5)
    ids, log_probs = np.load(folder / "train_ids.npy"), np.load(folder / "train_log_probs.npy")
    wanted = (torch.cat(by_hand["teacher"])[:, :300] / T).log_softmax(-1).numpy()
    np.testing.assert_allclose(log_probs, np.take_along_axis(wanted, ids.astype(np.int64), 1), atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 1.0}, "it was written with distill.temperature: 2.5"),
        ({"teacher": "org/other"}, "its teacher is "),
    ],
)
def test_a_file_of_another_temperature_or_teacher_is_refused(changes, words, job, written):
    options = job.plan.build.section(DistillSpec)
    found = TeacherFile.read(written)
    found.check(written, options, job.data, V)
    found.check(written, options.model_copy(update={"teacher": None}), job.data, V)
    with pytest.raises(UserError, match=words):
        found.check(written, options.model_copy(update=changes), job.data, V)
    for data in (replace(job.data, train=job.data.eval), replace(job.data, eval=None)):
        with pytest.raises(UserError, match="it was written for other data"):
            found.check(written, options, data, V)
    with pytest.raises(UserError, match="its vocabulary has 512 tokens, the model's 500"):
        found.check(written, options, job.data, 500)


def expected_loss(by_hand: dict[str, list[torch.Tensor]], indices: list[int], *, stored: bool) -> dict[str, float]:
    """Return the means over labelled tokens."""
    total = sft = count = 0.0
    for index in indices:
        teacher, student = by_hand["teacher"][index] / T, by_hand["student"][index]
        q, p = teacher.softmax(-1), (student / T).softmax(-1)
        rows = grouped(q, p, q.topk(K).indices) if stored else kl(q, p)
        total, count = total + float(rows.sum()), count + len(rows)
        sft += float(F.cross_entropy(student, by_hand["labels"][index], reduction="sum"))
    return {"loss": (0.7 * total + 0.3 * sft) / count, "kl": total / count, "sft_loss": sft / count}


def task_and_model(job: Any, folders: dict[str, Path], *, stored: bool, kernels: bool) -> tuple[Task, torch.nn.Module]:
    plan = job.plan
    if stored:
        plan = replace(plan, build=plan.build.with_section(DistillSpec, teacher_file=str(folders["file"])))
    model = AutoModelForCausalLM.from_pretrained(folders["student"], dtype=torch.float32).train()
    if kernels:
        patch(model)
    else:
        let_head_losses_run(model, "distill")
    return (OfflineDistillTask if stored else DistillTask)(SimpleNamespace(family="llama"), plan), model


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("stored", [True, False], ids=["file", "teacher"])
def test_micro_batches_of_a_model_add_up_to_the_mean_over_the_global_batch(
    stored, kernels, job, folders, written, by_hand
):
    task, model = task_and_model(job, folders, stored=stored, kernels=kernels)
    examples = job.data.train
    batcher = Batcher(examples, False, 4, 0, True, CPU, more_fields=task.batch_fields)
    task.prepare(model, [batcher])
    inputs = task.inputs(examples, np.array([4, 1, 3]), step=0)
    parts = ([np.array([4]), np.array([1])], [np.array([3])])
    found = sum(float(task.loss(model, {**batcher(rows), **inputs}).detach()) for rows in parts)
    wanted = expected_loss(by_hand, [4, 1, 3], stored=stored)
    assert found == pytest.approx(wanted.pop("loss"), rel=1e-4)
    assert task.measures.means(task.measures.take()) == pytest.approx(wanted, rel=1e-4)


def evaluated(job: Any, folders: dict[str, Path], *, stored: bool, world: int) -> dict[str, float]:
    """Evaluate three training examples, one in each forward."""
    task, model = task_and_model(job, folders, stored=stored, kernels=True)
    examples = job.data.train
    batcher = Batcher(examples, False, 4, 0, True, CPU, more_fields=task.batch_fields)
    task.prepare(model, [batcher])
    batching = SimpleNamespace(cp_size=1, row_ranks=world, eval_batch_size=1)
    plan = SimpleNamespace(batching=batching, rows=SimpleNamespace(packed=False, length=512))
    found = evaluate(plan, Accelerator(cpu=True), model, batcher, task, StopRequest(enabled=False))
    return {"loss": found.loss, **found.measures}


def test_ranks_evaluate_as_one_process(job, folders, written, by_hand):
    """Of nine examples, rank 1 has no last one."""
    count = len(job.data.train)
    assert count % 2 == 1

    def both(rank: int) -> list[dict[str, float]]:
        return [evaluated(job, folders, stored=stored, world=2) for stored in (True, False)]

    wanted = [expected_loss(by_hand, list(range(count)), stored=stored) for stored in (True, False)]
    for found in on_ranks(2, both):
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-4)


def test_an_evaluation_of_stored_log_probabilities_is_that_by_hand(job, folders, written, by_hand):
    AcceleratorState._reset_state(reset_partial_state=True)
    found = evaluated(job, folders, stored=True, world=1)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert found == pytest.approx(expected_loss(by_hand, list(range(len(job.data.train))), stored=True), rel=1e-4)
    assert 0 < found["kl"] < log(V)
