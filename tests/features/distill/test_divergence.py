"""Losses and gradients of distillation against plain torch in float64, in the head and from logits."""

import pytest
import torch
import torch.nn.functional as F
from ligertune_kernels import LinearLora
from support.rerun_interpreted import rerun_interpreted

from ligertune.features.distill import divergence
from ligertune.features.distill.divergence import DistillLoss, Divergence, TeacherHead
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.output_head import LogitTransform
from ligertune.features.task import Measures

N, E, TAUGHT_E, V = 24, 16, 20, 40
X = -100


def tensors(*, vocab: int = V, taught_vocab: int = V) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(vocab, (N,))
    labels[::3] = X
    made = {"hidden": (N, E), "weight": (vocab, E), "taught": (N, TAUGHT_E), "taught_weight": (taught_vocab, TAUGHT_E)}
    found = {name: torch.randn(shape, dtype=torch.float64) for name, shape in made.items()}
    found["hidden"].requires_grad_()
    found["weight"].requires_grad_()
    return {**found, "labels": labels}


def expected(
    of: dict[str, torch.Tensor], how: Divergence, student: LogitTransform, teacher: LogitTransform, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, mean divergence per labelled token) by the definition of each divergence."""
    size = min(len(of["weight"]), len(of["taught_weight"]))
    logits = student.logits(of["hidden"] @ of["weight"].T)
    q = (teacher.logits(of["taught"] @ of["taught_weight"].T)[:, :size] / how.temperature).softmax(-1)
    p = (logits[:, :size] / how.temperature).softmax(-1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum(-1)

    if how.beta in (0.0, 1.0):
        rows = kl(q, p) if how.beta == 0.0 else kl(p, q)
    else:
        mixture = how.beta * q + (1 - how.beta) * p
        rows = how.beta * kl(q, mixture) + (1 - how.beta) * kl(p, mixture)
    total = rows[of["labels"] != X].sum()
    sft = F.cross_entropy(logits, of["labels"], reduction="sum")
    loss = ((1 - how.sft_weight) * total + how.sft_weight * sft) / count
    return loss, total / (of["labels"] != X).sum()


def options(of: dict[str, torch.Tensor], student: LogitTransform, count: int, *, gathered: bool) -> dict:
    rows = (of["labels"] != X).nonzero().flatten()
    rows = torch.cat([rows, torch.zeros(2, dtype=rows.dtype)])  # the collator pads with rows that have no label
    scale = {"logit_scale": student.logit_scale, "softcap": student.softcap, "ignore_index": X}
    return {**scale, "num_items_in_batch": count, "labelled_rows": rows if gathered else None}


PLAIN = LogitTransform()
CASES = {
    "forward_kl": (Divergence(0.0), PLAIN, PLAIN, {}),
    "reverse_kl": (Divergence(1.0), PLAIN, PLAIN, {}),
    "jsd": (Divergence(0.3, temperature=1.7), PLAIN, PLAIN, {}),
    "with cross-entropy": (Divergence(0.0, sft_weight=0.25), PLAIN, PLAIN, {}),
    "logit scales": (Divergence(0.5), LogitTransform(0.25), LogitTransform(0.5), {}),
    "odd logit scales": (Divergence(0.5, sft_weight=0.5), LogitTransform(0.3), LogitTransform(0.7), {}),
    "soft cap": (Divergence(1.0, sft_weight=0.1), LogitTransform(1.0, 3.0), PLAIN, {}),
    "soft cap of the teacher": (Divergence(0.0, 2.0), PLAIN, LogitTransform(1.0, 3.0), {}),
    "longer teacher": (Divergence(0.0), PLAIN, PLAIN, {"taught_vocab": V + 8}),
    "longer student": (Divergence(0.5, sft_weight=0.5), PLAIN, PLAIN, {"taught_vocab": V - 8}),
    "soft cap, longer student": (Divergence(0.5), LogitTransform(1.0, 3.0), PLAIN, {"taught_vocab": V - 8}),
}


@pytest.mark.parametrize("way", ["fused", "fused, all rows", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_definition(case, way, monkeypatch):
    monkeypatch.setattr(divergence, "CHUNK_ROWS", 10)  # three chunks
    how, student, teacher, sizes = CASES[case]
    of, count = tensors(**sizes), 37
    wanted, mean = expected(of, how, student, teacher, count)
    wanted_gradients = torch.autograd.grad(wanted, (of["hidden"], of["weight"]))
    measures = Measures(how.measures)
    loss = DistillLoss(how, TeacherHead(of["taught_weight"], teacher), of["taught"], measures)
    if way == "dense":
        found = loss.dense(student.logits(of["hidden"] @ of["weight"].T), of["labels"], count)
    else:
        given = options(of, student, count, gathered=way == "fused")
        found = loss.fused(of["hidden"], of["weight"], None, of["labels"], given)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    for gradient, right in zip(torch.autograd.grad(found, (of["hidden"], of["weight"])), wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-12)
    assert measures.means(measures.take())["kl"] == pytest.approx(float(mean.detach()), rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_losses_in_float32(case):
    """Where Triton runs, these are the kernels' results."""
    how, student, teacher, sizes = CASES[case]
    of = tensors(**sizes)
    wanted, _ = expected(of, how, student, teacher, 37)
    wanted_gradients = torch.autograd.grad(wanted, (of["hidden"], of["weight"]))
    narrow = {name: t if name == "labels" else t.detach().float() for name, t in of.items()}
    inputs = [narrow[name].requires_grad_() for name in ("hidden", "weight")]
    loss = DistillLoss(how, TeacherHead(narrow["taught_weight"], teacher), narrow["taught"], Measures(how.measures))
    found = loss.fused(*inputs, None, of["labels"], options(of, student, 37, gathered=True))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=0)
    for gradient, right in zip(torch.autograd.grad(found, inputs), wanted_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_losses_of_the_kernels():
    rerun_interpreted(__file__, "-k", "float32")


@pytest.mark.parametrize("student", [PLAIN, LogitTransform(1.0, 3.0)], ids=["kernel", "chunks"])
def test_rows_without_a_label_have_no_loss_and_no_gradient(student):
    of, how = tensors(), Divergence()
    of["labels"].fill_(X)
    loss = DistillLoss(how, TeacherHead(of["taught_weight"], PLAIN), of["taught"], Measures(how.measures))
    found = loss.fused(of["hidden"], of["weight"], None, of["labels"], options(of, student, 1, gathered=False))
    assert found == 0
    gradients = torch.autograd.grad(found, (of["hidden"], of["weight"]), allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)


@pytest.mark.parametrize("student", [PLAIN, LogitTransform(1.0, 3.0)], ids=["kernel", "chunks"])
@pytest.mark.parametrize("taught_vocab", [V, V - 8])
def test_the_bias_of_the_head_is_part_of_the_students_logits(taught_vocab, student):
    """As one more column of the weight for a hidden state of one."""
    of, how, count = tensors(taught_vocab=taught_vocab), Divergence(0.3, 1.4, sft_weight=0.3), 37
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(N, 1, dtype=torch.float64)
    wider = {"hidden": torch.cat([of["hidden"], ones], 1), "weight": torch.cat([of["weight"], bias[:, None]], 1)}
    wanted, mean = expected({**of, **wider}, how, student, PLAIN, count)
    measures = Measures(how.measures)
    loss = DistillLoss(how, TeacherHead(of["taught_weight"], PLAIN), of["taught"], measures)
    found = loss.fused(of["hidden"], of["weight"], bias, of["labels"], options(of, student, count, gathered=True))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(one, bias)[0] for one in (found, wanted)), rtol=1e-9, atol=1e-12)
    logits = student.logits(wider["hidden"] @ wider["weight"].T).detach()
    sft = F.cross_entropy(logits, of["labels"])
    means = measures.means(measures.take())
    assert means == pytest.approx({"kl": mean.item(), "sft_loss": sft.item()}, rel=1e-6)


def test_the_options_name_the_divergence():
    """forward_kl is that of the teacher from the student: beta 0 of the generalised JSD."""
    found = {loss: Divergence.of(DistillSpec(loss=loss, beta=0.2)).beta for loss in ("forward_kl", "reverse_kl", "jsd")}
    assert found == {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.2}
    assert Divergence.of(DistillSpec(temperature=3.0, sft_weight=0.4)) == Divergence(0.5, 3.0, 0.4)


def test_an_adapter_of_the_head_is_part_of_the_students_logits():
    of, how = tensors(), Divergence(0.5, sft_weight=0.3)
    a, b = torch.randn(3, E, dtype=torch.float64), torch.randn(V, 3, dtype=torch.float64)
    adapted = {**of, "weight": (of["weight"] + 2.0 * b @ a).detach().requires_grad_()}
    wanted, _ = expected(adapted, how, PLAIN, PLAIN, 37)
    (d_weight,) = torch.autograd.grad(wanted, adapted["weight"])
    a.requires_grad_()
    b.requires_grad_()
    adapter = {"lora": LinearLora(a, b, 2.0)}
    loss = DistillLoss(how, TeacherHead(of["taught_weight"], PLAIN), of["taught"], Measures(how.measures))
    given = {**options(of, PLAIN, 37, gathered=True), **adapter}
    found = loss.fused(of["hidden"], of["weight"].detach(), None, of["labels"], given)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    for gradient, right in zip(
        torch.autograd.grad(found, (a, b)), (2 * b.T @ d_weight, 2 * d_weight @ a.T), strict=True
    ):
        torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-12)
