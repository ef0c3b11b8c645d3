"""Documents of a row do not see each other, and each way in which they could is found or refused."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import transformers
from packed_rows import FAMILIES, LENGTHS, documents, make, packed
from transformers import AutoModelForCausalLM

from ligertune.attention.packed_documents import guard
from ligertune.data.batching.collate import collate_packed
from ligertune.errors import UserError
from ligertune.train.checks import check_document_isolation, document_leak


def logits_of(model, batch) -> torch.Tensor:
    labels_apart = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        return model(**labels_apart).logits[0]  # (T, V)


def other_first_document() -> dict:
    """The same row, with other tokens in its first document."""
    first = documents(seed=1)[0]
    return collate_packed([first, *documents()[1:]], pad_token_id=0, pad_to_multiple_of=16)


def reached(model, **faults) -> list[bool]:
    """Which of the documents notice that the first one was changed."""
    one, other = (
        logits_of(model, {"use_cache": False, **batch, **faults}) for batch in (packed(), other_first_document())
    )
    moved = (one - other).abs().amax(-1)[: sum(LENGTHS)].split(LENGTHS)
    return [bool(document.max() > 1e-4) for document in moved]


@pytest.mark.parametrize("implementation", ["document_attention", "per_document", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_changed_document_notices(family, implementation):
    model = make(family, attn_implementation=implementation).eval()
    guard(model)
    assert reached(model) == [True, False, False, False, False]
    assert document_leak(model, multiple_of=16) < 1e-5


# what would let a document see another, as what is wrong in the call
LEAKS = {
    "positions go on": {"position_ids": torch.arange(64)[None]},
    "a mask of ones": {"attention_mask": torch.ones(1, 64, dtype=torch.int64)},
    "a cache": {"use_cache": True},
}


@pytest.mark.parametrize("fault", LEAKS)
def test_a_leak_is_refused(fault):
    model = make("llama", attn_implementation="eager").eval()
    assert reached(model, **LEAKS[fault]) != [True, False, False, False, False]  # transformers does not notice
    guard(model)
    with pytest.raises(ValueError, match=r"packed row"):
        reached(model, **LEAKS[fault])


@pytest.mark.parametrize("fault", LEAKS)
def test_our_attention_goes_by_where_documents_begin_and_by_nothing_else(fault):
    model = make("llama", attn_implementation="per_document").eval()
    assert reached(model, **LEAKS[fault]) == [True, False, False, False, False]


def test_wrong_places_of_documents_are_a_leak():
    """The other planted fault: what the attention goes by is wrong."""
    model = make("llama", attn_implementation="per_document").eval()
    wrong = {"document_lengths": (43, 8, 13)}
    assert reached(model, **wrong, **LEAKS["positions go on"]) == [True, True, True, False, False]
    with pytest.raises(ValueError, match="guard"):
        reached(model, **wrong)
    guard(model)
    with pytest.raises(ValueError, match="do not restart"):
        reached(model, **wrong)


TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# class of its configuration, what it takes, attention -> what documents see of each other in it
CONTAMINATING = [
    ("MambaConfig", {}, "eager", "see each other"),
    ("GptOssConfig", {**HEADS, **EXPERTS}, "eager", "see each other"),
    ("GptOssConfig", {**HEADS, **EXPERTS}, "per_document", "sinks"),
    ("Lfm2Config", {**HEADS, "layer_types": ["conv", "full_attention"]}, "per_document", "see each other"),
    ("Llama4TextConfig", {**HEADS, **EXPERTS, "attention_chunk_size": 8}, "per_document", "pattern of its own"),
    ("StableLmConfig", {"num_attention_heads": 4, "num_key_value_heads": 2}, "per_document", "places of documents"),
]


@pytest.mark.parametrize(("name", "settings", "implementation", "why"), CONTAMINATING, ids=lambda v: str(v)[:16])
def test_a_model_that_cannot_be_packed_is_refused(name, settings, implementation, why):
    config = getattr(transformers, name)(**{**TINY, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    guard(model)
    with pytest.raises(UserError, match=f"data.packing: .*{why}"):
        check_document_isolation(model, multiple_of=16)


def test_a_window_that_the_layer_does_not_keep_is_refused():
    """A layer whose mask is to be local, and that attends without a window."""
    model = make("mistral", attn_implementation="per_document")
    guard(model)
    for layer in model.model.layers:
        layer.self_attn.config = make("llama").config
        layer.self_attn.config._attn_implementation = "per_document"
    with pytest.raises(UserError, match="pattern of its own"):
        check_document_isolation(model, multiple_of=16)


def test_after_a_call_that_failed_rows_that_are_not_packed_are_masked_again():
    model = make("mistral", attn_implementation="per_document").eval()
    guard(model)
    expected = model(**tiny_models.batch(), use_cache=False).logits
    with pytest.raises(TypeError):
        model(**packed(), use_cache=False, output_hidden_states=object(), return_dict=[], cu_seq_lens_q=None, labels=3)
    torch.testing.assert_close(model(**tiny_models.batch(), use_cache=False).logits, expected)
