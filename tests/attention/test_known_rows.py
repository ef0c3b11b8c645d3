"""Nobody looks for documents in position ids where it is known what they say."""

from __future__ import annotations

import pytest
import torch
from packed_rows import make, packed
from transformers import masking_utils

from ligertune.attention.packed_documents import guard
from ligertune.attention.packed_mask_skip import know_rows


@pytest.fixture
def looks():
    """The position ids that transformers was asked about."""
    before, seen = masking_utils.find_packed_sequence_indices, []

    def find_packed_sequence_indices(position_ids):
        seen.append(position_ids)
        return before(position_ids)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
    yield seen
    masking_utils.find_packed_sequence_indices = before


def logits(model, **batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch, use_cache=False).logits


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma2", "eager"), ("mistral", "sdpa")])
def test_rows_without_position_ids_are_not_looked_into(family, attention, looks):
    ids = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    model = make(family, attn_implementation=attention).eval()
    expected = logits(model, input_ids=ids)
    assert looks
    know_rows(model, packed=False)
    looks.clear()
    assert torch.equal(logits(model, input_ids=ids), expected) and not looks


def test_position_ids_that_a_caller_brings_are_looked_into(looks):
    """Documents that only their positions tell apart."""
    model = make("llama", attn_implementation="sdpa").eval()
    ids = torch.randint(0, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    apart = logits(model, input_ids=ids, position_ids=positions)
    know_rows(model, packed=False)
    looks.clear()
    assert torch.equal(logits(model, input_ids=ids, position_ids=positions), apart) and looks
    assert not torch.allclose(logits(model, input_ids=ids), apart)


@pytest.mark.parametrize(("implementation", "looked"), [("per_document", False), ("eager", True)])
def test_packed_rows_are_looked_into_where_attention_needs_a_mask(implementation, looked, looks):
    model = make("mistral", attn_implementation=implementation).eval()
    batch = {name: value for name, value in packed().items() if name != "labels"}
    know_rows(model, packed=True)
    other = make("mistral", attn_implementation="per_document").eval()
    guard(other)
    expected = logits(other, **batch)
    looks.clear()
    torch.testing.assert_close(logits(model, **batch), expected, rtol=1e-4, atol=1e-5)
    assert bool(looks) == looked
