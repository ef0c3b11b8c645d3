"""A teacher's written log-probabilities against transformers, and the loss that reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.quickstart_runs import plan_run
from support.tasks.distill_runs import TEACHER, distill_settings, save_student
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ligertune.errors import UserError
from ligertune.features.distill.divergence import Divergence
from ligertune.features.distill.offline_task import StoredLoss
from ligertune.features.distill.teacher import compare_vocabularies, plan_teacher
from ligertune.features.distill.teacher_files import write_teacher_file
from ligertune.features.task import Measures
from ligertune.planning.precision import Precision

X, V = -100, 30
TEMPERATURE, TOP_K, SIZE = 2.0, 6, 300  # SIZE: the student's vocabulary, without the teacher's last tokens


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    return save_student(tmp_path_factory.mktemp("student"))


def test_written_numbers_are_those_of_transformers(student, tmp_path):
    """Of each trained token: what the teacher expects at the token before it, at the temperature, of SIZE tokens."""
    changes = {"distill.temperature": TEMPERATURE, "distill.top_k": TOP_K, "data.datasets.0.max_samples": 12}
    job = plan_run(tmp_path, **distill_settings(student, **changes))
    found = write_teacher_file(
        job.plan, job.data, tmp_path / "file", pad_token_id=0, vocab_size=SIZE, show=lambda line: None
    )
    assert (found.temperature, found.top_k, found.vocab_size) == (TEMPERATURE, TOP_K, SIZE)
    model = AutoModelForCausalLM.from_pretrained(TEACHER).eval()
    for name, examples in (("train", job.data.train), ("eval", job.data.eval)):
        ids, log_probs = (np.load(tmp_path / "file" / f"{name}_{part}.npy") for part in ("ids", "log_probs"))
        expected = []
        with torch.no_grad():
            for example in examples:
                logits = model(input_ids=torch.from_numpy(example.input_ids).long()[None]).logits[0, :, :SIZE]
                trained = np.flatnonzero(example.labels[1:] != X)
                expected.append((logits[trained] / TEMPERATURE).log_softmax(-1))
        expected = torch.cat(expected)
        assert ids.shape == log_probs.shape == (len(expected), TOP_K)
        np.testing.assert_allclose(log_probs, expected.topk(TOP_K).values, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(log_probs, expected.gather(-1, torch.from_numpy(ids).long()), rtol=1e-4, atol=1e-4)


def test_the_teacher_has_its_own_depth_and_weights(student, tmp_path):
    """The student is random and has one layer."""
    whole = plan_run(tmp_path, **distill_settings(student)).plan.teacher
    random = {"model.init": "random", "model.num_hidden_layers": 1}
    cut = plan_run(tmp_path, **distill_settings(student, **random)).plan.teacher
    assert cut.n_parameters == whole.n_parameters
    assert whole.n_parameters == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(TEACHER).parameters())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision("float32", "no"), "float32"),
        (Precision("bfloat16", "no"), "bfloat16"),
        (Precision("float32", "fp16"), "float16"),
        (Precision("float32", "bf16"), "bfloat16"),
    ],
)
def test_the_teacher_has_the_dtype_in_which_the_student_computes(precision, dtype, student, tmp_path):
    plan = plan_run(tmp_path, **distill_settings(student)).plan
    config, tokenizer = AutoConfig.from_pretrained(student), AutoTokenizer.from_pretrained(student)
    assert plan_teacher(plan, config, tokenizer, plan.machine, precision).dtype == dtype


def test_the_first_id_behind_the_teachers_embedding_is_refused():
    """Ids 0 to 3 have a row."""
    taught = ({"a": 0, "b": 1}, 4)
    assert compare_vocabularies("o/l", ({"a": 0, "b": 1, "c": 3}, 4), taught)
    with pytest.raises(UserError, match="no embedding for id 4 of the student's tokenizer; its last is 3"):
        compare_vocabularies("o/l", ({"a": 0, "b": 1, "c": 4}, 5), taught)


@pytest.mark.parametrize("kept", [6, V], ids=["some", "all"])
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_the_loss_of_a_head_with_a_bias_a_scale_and_a_soft_cap(softcap, kept):
    """And of its cross-entropy, which has no temperature."""
    temperature, scale, w, count = 1.5, 0.6, 0.3, 11
    torch.manual_seed(0)
    shapes = {"hidden": (12, 8), "weight": (V, 8), "bias": (V,)}
    head = {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    labels = torch.randint(V, (12,))
    labels[::4] = X
    trained = labels != X
    z = (head["hidden"] @ head["weight"].T + head["bias"]) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    q, ids = torch.randn(9, V, dtype=torch.float64).softmax(-1).topk(kept)
    p = (z[trained] / temperature).softmax(-1)
    chosen = p.gather(-1, ids)
    divergence = (q * (q / chosen).log()).sum()
    if kept < V:
        rest, rest_of_student = 1 - q.sum(-1), 1 - chosen.sum(-1)
        divergence = divergence + (rest * (rest / rest_of_student).log()).sum()
    sft = F.cross_entropy(z, labels, reduction="sum")
    wanted = ((1 - w) * divergence + w * sft) / count
    measures = Measures(("kl", "sft_loss"))
    loss = StoredLoss(Divergence(0.0, temperature, w), ids, q.log(), measures)
    options = {"logit_scale": scale, "softcap": softcap, "num_items_in_batch": count, "labelled_rows": None}
    found = loss.fused(head["hidden"], head["weight"], head["bias"], labels, options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    torch.testing.assert_close(loss.dense(z, labels, count), wanted, rtol=1e-9, atol=0)
    means = measures.means(measures.take())
    assert means == pytest.approx({"kl": divergence.item() / 9, "sft_loss": sft.item() / 9}, rel=1e-5)
    leaves = list(head.values())
    for gradient, right in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-8, atol=1e-11)


def test_probabilities_that_add_up_to_a_little_more_than_one_give_a_number():
    """As rounding in float32 makes them: nothing is left for the other tokens."""
    log_q = torch.tensor([[0.7, 0.3, 1e-6]]).log()
    assert float(log_q.exp().sum()) > 1
    loss = StoredLoss(Divergence(0.0), torch.tensor([[1, 2, 3]]), log_q, Measures(("kl",)))
    logits = torch.zeros(1, 8, requires_grad=True)
    found = loss.dense(logits, torch.tensor([1]), 1)
    found.backward()
    expected = 0.7 * np.log(0.7 * 8) + 0.3 * np.log(0.3 * 8) + 1e-6 * np.log(8e-6)
    assert float(found) == pytest.approx(expected, rel=1e-5) and bool(logits.grad.isfinite().all())
