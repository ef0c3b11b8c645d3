"""Masks are created without a search of position_ids where the documents are known, in the prepared model alone."""

import pytest
import torch
from support.tasks.packed_rows import make, packed
from transformers import masking_utils

from ligertune.patching.packing_checks import install_packing_checks, prepare_masks


@pytest.fixture
def searches():
    """Record the position_ids that transformers searches for documents."""
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
def test_rows_without_position_ids_are_not_searched(family, attention, searches):
    ids = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    model = make(family, attn_implementation=attention).eval()
    expected = logits(model, input_ids=ids)
    assert searches
    prepare_masks(model)
    searches.clear()
    assert torch.equal(logits(model, input_ids=ids), expected) and not searches


def test_position_ids_of_the_caller_are_searched(searches):
    """Only their positions separate the documents."""
    model = make("llama", attn_implementation="sdpa").eval()
    ids = torch.randint(0, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    apart = logits(model, input_ids=ids, position_ids=positions)
    prepare_masks(model)
    searches.clear()
    assert torch.equal(logits(model, input_ids=ids, position_ids=positions), apart) and searches
    assert not torch.allclose(logits(model, input_ids=ids), apart)


@pytest.mark.parametrize(("implementation", "searched"), [("per_document", False), ("eager", True)])
def test_packed_rows_are_searched_where_attention_needs_a_mask(implementation, searched, searches):
    model = make("mistral", attn_implementation=implementation).eval()
    batch = {name: value for name, value in packed().items() if name != "labels"}
    prepare_masks(model)
    other = make("mistral", attn_implementation="per_document").eval()
    install_packing_checks(other)
    expected = logits(other, **batch)
    searches.clear()
    torch.testing.assert_close(logits(model, **batch), expected, rtol=1e-4, atol=1e-5)
    assert bool(searches) == searched


def test_other_models_are_searched_as_before(searches):
    prepare_masks(make("llama"))
    searches.clear()
    logits(make("llama"), input_ids=torch.ones(1, 8, dtype=torch.int64))
    assert searches
