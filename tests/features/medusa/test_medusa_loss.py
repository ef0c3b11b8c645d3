"""The fused Medusa loss against one from all logits, and targets computed by hand."""

import numpy as np
import pytest
import torch
from ligertune_kernels import labelled_rows
from peft import LoraConfig, get_peft_model
from support.models.tiny_models import VOCAB, batch, make
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ligertune.errors import UserError
from ligertune.features.medusa.heads_loss import shifted_targets, target_shifts
from ligertune.features.medusa.medusa_model import attach_heads
from ligertune.features.medusa.recipe import MedusaSpec
from ligertune.features.output_head import LogitTransform, logit_transform
from ligertune.features.task import count_labels_ahead
from ligertune.patching.packing_checks import install_packing_checks

X = -100
KINDS = ("padded", "packed", "sparse")


def inputs(kind: str) -> dict:
    """Return two rows, one padded; or one row of three packed documents; or two rows with one trained token."""
    if kind == "packed":
        labels = batch(rows=1, length=24)["labels"]
        lengths = torch.tensor([9, 4, 11])
        position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
        labels[position_ids == 0] = X
        return {"input_ids": batch(rows=1, length=24)["input_ids"], "labels": labels, "position_ids": position_ids}
    made = batch()
    del made["attention_mask"]
    if kind == "sparse":  # some heads have no target, others one
        made["labels"][:] = X
        made["labels"][0, 3] = 7
    return made


def perturb(module: torch.nn.Module, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += size * torch.randn(parameter.shape, generator=generator)


def model_with_heads(base="llama", *, fused: bool, **medusa: object):
    """Return a model (or a family's) with random heads: no block is the identity."""
    spec = MedusaSpec(num_heads=3, num_layers=2, **medusa)
    model = attach_heads(make(base) if isinstance(base, str) else base, spec, fused=fused)
    perturb(model.medusa_head, 0.1, seed=1)
    return model


def loss_and_gradients(model, kind: str, *, rows: bool):
    made = inputs(kind)
    found = shifted_targets(made["labels"], made.get("position_ids"), model.shifts)
    if rows:
        made["labelled_rows"] = labelled_rows((found != X).any(0).long() - 1, ignore_index=-1, multiple_of=1)
    output = model(**made, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return output, gradients


def assert_same(found: tuple, expected: tuple) -> None:
    """Compare two results of `loss_and_gradients`."""
    (output, gradients), (truth, true_gradients) = found, expected
    torch.testing.assert_close(output.loss, truth.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.part_losses, truth.part_losses, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == true_gradients.keys()
    for name, gradient in true_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("rows", [False, True], ids=["all-rows", "trained-rows"])
def test_fused_equals_all_logits_at_once(stage, lm_head, kind, rows):
    naive = loss_and_gradients(model_with_heads(fused=False, stage=stage, lm_head=lm_head), kind, rows=False)
    assert_same(loss_and_gradients(model_with_heads(fused=True, stage=stage, lm_head=lm_head), kind, rows=rows), naive)


def test_stage_2_trains_only_adapters_and_heads_of_an_adapted_model():
    adapted = get_peft_model(make("llama"), LoraConfig(r=4, target_modules="all-linear"))
    perturb(torch.nn.ParameterList(p for name, p in adapted.named_parameters() if "lora_B" in name), 0.05, seed=3)
    naive = loss_and_gradients(model_with_heads(adapted, fused=False, stage=2), "padded", rows=False)
    adapted.zero_grad()
    found = loss_and_gradients(model_with_heads(adapted, fused=True, stage=2), "padded", rows=False)
    assert_same(found, naive)
    assert {"lora" in name or name.startswith("medusa_head.") for name in found[1]} == {True}
    assert any("lora_A" in name for name in found[1]) and any(name.startswith("medusa_head.") for name in found[1])


class _AtTheFirstLogits(TorchDispatchMode):
    """Count the noted tensors that are alive when the first tensor of width V is made."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[StorageWeakRef] = []
        self.alive: int | None = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if self.noted and self.alive is None and isinstance(made, torch.Tensor) and made.shape[-1:] == (VOCAB,):
            self.alive = sum(not storage.expired() for storage in self.noted)
        return made


@pytest.mark.parametrize(("lm_head", "alive"), [("shared", 0), ("own", 3)])
def test_hidden_states_of_heads_are_freed_before_the_logits(lm_head, alive):
    """With a shared output head the hidden states are stacked, and the single ones freed."""
    model = model_with_heads(fused=True, lm_head=lm_head)
    seen = _AtTheFirstLogits()
    for head in model.medusa_head:
        head[1].register_forward_hook(lambda _, args, out: seen.noted.append(StorageWeakRef(out.untyped_storage())))
    with seen:
        model(**inputs("padded"), use_cache=False)
    assert len(seen.noted) == 3 and seen.alive == alive


def test_fsdp_finds_the_loss_in_the_output():
    output, _ = loss_and_gradients(model_with_heads(fused=True, stage=1, lm_head="shared"), "padded", rows=False)
    assert any(leaf is output.loss for leaf in tree_flatten(output)[0])


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_fused_distillation_equals_all_logits_at_once(family, kind):
    """The teacher is the model before its weights were changed, so the KL divergence is not zero."""
    found = []
    for fused in (False, True):
        model = model_with_heads(family, fused=fused, stage=2, self_distillation=True)
        perturb(model.base_model, 0.05, seed=2)
        found.append(loss_and_gradients(model, kind, rows=fused))
    assert found[0][0].part_losses[0] > 1e-3
    assert_same(found[1], found[0])
    assert not model.train().teacher.training
    assert not any(name.startswith("teacher.") for name in found[1][1])


@pytest.mark.parametrize("family", ["gemma2", "cohere2", "granite", "llama_tied", "qwen3", "mixtral"])
def test_logit_transform_matches_the_model(family):
    model = make(family).eval()
    transform, made = logit_transform(model), inputs("padded")
    with torch.no_grad():
        hidden = model.base_model(input_ids=made["input_ids"])[0]
        expected = model(input_ids=made["input_ids"]).logits.float()
    torch.testing.assert_close(transform.logits(model.lm_head(hidden)), expected, rtol=1e-6, atol=1e-6)
    assert (transform == LogitTransform()) == (family in ("llama_tied", "qwen3", "mixtral"))


def test_targets_by_hand():
    """Eight tokens: two of a prompt, then 12 to 17. Head 1 predicts two tokens ahead, head 2 three."""
    labels = torch.tensor([[X, X, 12, 13, 14, 15, 16, 17]])
    assert target_shifts(2, with_model=True) == (1, 2, 3)
    assert target_shifts(2, with_model=False) == (2, 3)
    assert shifted_targets(labels, None, (1, 2, 3))[:, 0].tolist() == [
        [X, 12, 13, 14, 15, 16, 17, X],
        [12, 13, 14, 15, 16, 17, X, X],
        [13, 14, 15, 16, 17, X, X, X],
    ]


def test_targets_never_cross_documents():
    """Two documents of four tokens; the first label of each is not trained."""
    labels = torch.tensor([[X, 11, 12, 13, X, 21, 22, 23]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    assert shifted_targets(labels, positions, (1, 2, 3, 9))[:, 0].tolist() == [
        [11, 12, 13, X, 21, 22, 23, X],
        [12, 13, X, X, 22, 23, X, X],
        [13, X, X, X, 23, X, X, X],
        [X] * 8,
    ]


def test_count_labels_ahead_counts_the_shifted_targets():
    rng, documents = np.random.default_rng(0), []
    for length in (1, 2, 3, 5, 8, 13):
        labels = rng.integers(5, 50, size=length)
        labels[rng.random(length) < 0.3] = X
        labels[0] = X
        documents.append(labels)
    trained = [int((labels != X).sum()) for labels in documents]
    packed = torch.from_numpy(np.concatenate(documents))[None]
    positions = torch.cat([torch.arange(len(labels)) for labels in documents])[None]
    ahead = target_shifts(5, with_model=True)
    expected = (shifted_targets(packed, positions, ahead) != X).sum((1, 2)).tolist()
    assert count_labels_ahead(documents, trained, ahead) == expected


@pytest.mark.parametrize("fused", [False, True], ids=["naive", "fused"])
def test_a_packed_row_has_the_loss_of_its_documents(fused):
    model = model_with_heads(fused=fused)
    model.base_model.config._attn_implementation = "per_document"
    install_packing_checks(model.base_model.base_model)
    made, lengths = inputs("packed"), (9, 4, 11)
    packed = model(**made, document_lengths=lengths, cu_seq_lens_q=torch.tensor([0, 9, 13, 24]), use_cache=False)
    ends = np.cumsum(lengths)
    counts = count_labels_ahead(
        [made["labels"][0, end - n : end].numpy() for end, n in zip(ends, lengths, strict=True)],
        [int((made["labels"] != X).sum())],
        model.shifts,
    )
    alone = sum(
        model(made["input_ids"][:, end - n : end], made["labels"][:, end - n : end], num_items_in_batch=counts).loss
        for end, n in zip(ends, lengths, strict=True)
    )
    torch.testing.assert_close(packed.loss, alone, rtol=1e-6, atol=1e-6)


def test_heads_start_as_the_model_and_share_no_block():
    model = attach_heads(make("llama"), MedusaSpec(num_heads=3, num_layers=2, lm_head="own"), fused=True)
    hidden = torch.randn(2, 5, 64)
    for output in model.medusa_head.hidden(hidden):
        assert torch.equal(output, hidden)
    assert all(torch.equal(own, model.get_output_embeddings().weight) for own in model.medusa_head.projections(None))
    places = [parameter.data_ptr() for parameter in model.medusa_head.parameters()]
    assert len(set(places)) == len(places) == 3 * (2 * 2 + 1)


def test_stage_1_trains_the_heads_and_stage_2_everything():
    frozen = model_with_heads(fused=True)
    output, gradients = loss_and_gradients(frozen, "padded", rows=True)
    assert all(name.startswith("medusa_head.") for name in gradients) and output.part_losses.shape == (3,)
    assert all(p.grad is None for p in frozen.base_model.parameters())
    joint = model_with_heads(fused=True, stage=2)
    assert joint.train().base_model.training and not frozen.train().base_model.training  # no dropout where frozen
    output, gradients = loss_and_gradients(joint, "padded", rows=True)
    assert output.part_losses.shape == (4,)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())


def test_the_loss_is_weighted_by_decay_and_coefficient():
    model = model_with_heads(fused=True, stage=2, decay_coefficient=0.5, heads_coefficient=0.3)
    made = inputs("padded")
    own, *heads = (output := model(**made)).part_losses.tolist()
    assert output.loss.item() == pytest.approx(own + 0.3 * sum(0.5**k * part for k, part in enumerate(heads, 1)))
    assert model(**made, heads_coefficient=0.0).loss.item() == pytest.approx(own)


def test_a_head_with_a_bias_is_refused():
    model = make("llama")
    model.lm_head = torch.nn.Linear(64, 128, bias=True)
    with pytest.raises(UserError, match="has a bias"):
        attach_heads(model, MedusaSpec(), fused=True)
