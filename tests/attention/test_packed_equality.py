"""Packed training has the loss and the gradients of its documents one by one."""

from functools import cache

import pytest
import torch
from support.covering import every_pair
from support.models import tiny_models
from support.tasks.packed_rows import CAPPED, FAMILIES, LENGTHS, history, make, packed, separate

from ligertune.attention import packed_documents
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.patching.patch import patch

# transformers' eager attention finds documents by position_ids
IMPLEMENTATIONS = ["document_attention", "fa4_or_document_attention", "per_document", "eager", "varlen"]


def flash_on_a_cpu(query, key, value, bounds, longest, *, scale, window):
    """Compute flash_varlen as torch defines it: the last query sees the last key, window[0] to the left, causal."""
    out, (q_bounds, k_bounds) = [], bounds
    for document in range(len(q_bounds) - 1):
        q = query[q_bounds[document] : q_bounds[document + 1]]
        k, v = (t[k_bounds[document] : k_bounds[document + 1]].repeat_interleave(query.shape[1] // t.shape[1], dim=1)
                for t in (key, value))  # fmt: skip
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        seen = (distance >= -window[1]) & ((distance <= window[0]) | (window[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v))
    return torch.cat(out)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def number_of_targets() -> int:
    return sum(tiny_models.trained_tokens(batch["labels"]) for batch in separate())


@cache
def trained_alone(family: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of the documents one by one, with the eager attention of transformers."""
    model = make(family, attn_implementation="eager")
    count = number_of_targets()
    losses = [model(**batch, num_items_in_batch=count, use_cache=False).loss for batch in separate()]
    torch.stack(losses).sum().backward()
    return sum(losses).item(), gradients(model)


@pytest.mark.parametrize("family, implementation, patched", every_pair(FAMILIES, IMPLEMENTATIONS, [False, True]))
def test_loss_and_gradients_are_those_of_single_documents(family, implementation, patched, monkeypatch):
    if implementation == "varlen" and family == CAPPED:
        pytest.skip("torch's flash attention has no soft cap")
    monkeypatch.setattr(packed_documents, "flash_varlen", flash_on_a_cpu)
    expected_loss, expected = trained_alone(family)
    model = make(family, attn_implementation=implementation)
    if patched:
        patch(model)
    install_packing_checks(model)
    loss = model(**packed(), num_items_in_batch=number_of_targets(), use_cache=False).loss
    loss.backward()

    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-5 * float(expected[name].abs().max()))


def test_no_gradient_is_copied_into_zeros():
    """`query[0]` makes zeros and copies into them in its backward; squeeze(0) is a view both ways."""
    model = make("llama", attn_implementation="document_attention")
    install_packing_checks(model)
    nodes = history(model(**packed(), num_items_in_batch=10, use_cache=False).loss)
    assert "SelectBackward0" not in nodes
    assert "MmBackward0" in nodes


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_recomputed_layers_are_packed_too(family):
    from ligertune.activations.checkpointing import checkpoint_layers

    found = []
    for checkpointed in (False, True):
        model = make(family, attn_implementation="per_document")
        install_packing_checks(model)
        if checkpointed:
            checkpoint_layers(model)
        model(**packed(), num_items_in_batch=10, use_cache=False).loss.backward()
        found.append(gradients(model))
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=0, atol=0)


def test_windows_are_shorter_than_the_longest_document():
    windowed = {family: make(family).config.sliding_window for family in ("gemma2", "mistral", "qwen2", "phi3_window")}
    assert all(window and window < max(LENGTHS) for window in windowed.values())
    assert make(CAPPED).config.attn_logit_softcapping


def test_unpacked_rows_use_the_attention_of_transformers():
    batch = tiny_models.batch()
    expected = make("mistral", attn_implementation="sdpa")(**batch, use_cache=False).logits
    for implementation in ("document_attention", "per_document", "varlen"):
        model = make("mistral", attn_implementation=implementation)
        install_packing_checks(model)
        torch.testing.assert_close(model(**batch, use_cache=False).logits, expected)


def test_unpacked_rows_keep_the_soft_cap_of_scores():
    """With padding on the right, whose rows see their own key at most, and with a window."""
    batch = tiny_models.batch()
    expected = make(CAPPED, attn_implementation="eager")(**batch, use_cache=False).logits
    uncapped = make(CAPPED, attn_implementation="eager", attn_logit_softcapping=None)(**batch, use_cache=False).logits
    for implementation in ("document_attention", "per_document"):
        model = make(CAPPED, attn_implementation=implementation)
        install_packing_checks(model)
        found = model(**batch, use_cache=False).logits
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[-1, :2], expected[-1, :2])
        assert not torch.allclose(found[0], uncapped[0])
        prompt = batch["input_ids"][:1]
        texts = [one.eval().generate(prompt, max_new_tokens=8, do_sample=False).tolist()
                 for one in (model, make(CAPPED, attn_implementation="eager"))]  # fmt: skip
        assert texts[0] == texts[1]


def test_generation_with_a_cache_is_unchanged():
    prompt = tiny_models.batch(rows=1)["input_ids"]
    texts = []
    for implementation in ("sdpa", "document_attention", "per_document", "varlen"):
        model = make("mistral", attn_implementation=implementation).eval()
        install_packing_checks(model)
        texts.append(model.generate(prompt, max_new_tokens=8, do_sample=False).tolist())
    assert all(text == texts[0] for text in texts)
