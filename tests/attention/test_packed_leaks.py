"""Documents of a row do not attend to each other; each way in which they could is found or refused."""

import pytest
import torch
import transformers
from support.models import tiny_models
from support.tasks.packed_rows import FAMILIES, LENGTHS, documents, make, packed
from torch import nn
from transformers import AutoModelForCausalLM

from ligertune.attention.document_isolation import check_document_isolation, document_leak
from ligertune.attention.packed_documents import FUNCTIONS
from ligertune.data.batching.collate import collate_packed
from ligertune.errors import UserError
from ligertune.patching.packing_checks import install_packing_checks, prepare_masks


def logits_of(model, batch) -> torch.Tensor:
    labels_apart = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        return model(**labels_apart).logits[0]  # (T, V)


def other_first_document() -> dict:
    """The same row, with other tokens in its first document."""
    first = documents(seed=1)[0]
    return collate_packed([first, *documents()[1:]], pad_token_id=0, pad_to_multiple_of=16)


def reached(model, **faults) -> list[bool]:
    """Return which documents change when the first one is changed."""
    one, other = (
        logits_of(model, {"use_cache": False, **batch, **faults}) for batch in (packed(), other_first_document())
    )
    moved = (one - other).abs().amax(-1)[: sum(LENGTHS)].split(LENGTHS)
    return [bool(document.max() > 1e-4) for document in moved]


@pytest.mark.parametrize("implementation", ["document_attention", "per_document", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_changed_document_changes(family, implementation):
    model = make(family, attn_implementation=implementation).eval()
    install_packing_checks(model)
    assert reached(model) == [True, False, False, False, False]
    assert document_leak(model, multiple_of=16) < 1e-5


# wrong arguments of a call that let one document attend to another
LEAKS = {
    "positions go on": {"position_ids": torch.arange(64)[None]},
    "a mask of ones": {"attention_mask": torch.ones(1, 64, dtype=torch.int64)},
    "a cache": {"use_cache": True},
}


@pytest.mark.parametrize("fault", LEAKS)
def test_a_leak_is_refused(fault):
    model = make("llama", attn_implementation="eager").eval()
    assert reached(model, **LEAKS[fault]) != [True, False, False, False, False]  # transformers raises nothing
    install_packing_checks(model)
    with pytest.raises(ValueError, match=r"packed row"):
        reached(model, **LEAKS[fault])


@pytest.mark.parametrize("fault", LEAKS)
def test_our_attention_uses_only_the_places_of_documents(fault):
    model = make("llama", attn_implementation="per_document").eval()
    assert reached(model, **LEAKS[fault]) == [True, False, False, False, False]


def test_wrong_places_of_documents_are_a_leak():
    """Wrong document lengths let documents attend to each other."""
    model = make("llama", attn_implementation="per_document").eval()
    wrong = {"document_lengths": (43, 8, 13)}
    assert reached(model, **wrong, **LEAKS["positions go on"]) == [True, True, True, False, False]
    with pytest.raises(ValueError, match="install_packing_checks"):
        reached(model, **wrong)
    install_packing_checks(model)
    with pytest.raises(ValueError, match="do not restart"):
        reached(model, **wrong)


TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# class of the configuration, its arguments, attention -> part of the refusal
CONTAMINATING = [
    ("MambaConfig", {}, "eager", "see each other"),
    ("GptOssConfig", {**HEADS, **EXPERTS}, "eager", "see each other"),
    ("GptOssConfig", {**HEADS, **EXPERTS}, "per_document", "sinks"),
    (
        "Lfm2Config",
        {**HEADS, "layer_types": ["conv", "full_attention"]},
        "per_document",
        "(takes no packed rows|see each other)",
    ),
    ("Llama4TextConfig", {**HEADS, **EXPERTS, "attention_chunk_size": 8}, "per_document", "own attention pattern"),
    ("StableLmConfig", {"num_attention_heads": 4, "num_key_value_heads": 2}, "per_document", "places of documents"),
]


@pytest.mark.parametrize(("name", "settings", "implementation", "why"), CONTAMINATING, ids=lambda v: str(v)[:16])
def test_a_model_that_cannot_be_packed_is_refused(name, settings, implementation, why):
    config = getattr(transformers, name)(**{**TINY, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    install_packing_checks(model)
    with pytest.raises(UserError, match=f"data.packing: .*{why}"):
        check_document_isolation(model, multiple_of=16)


# terms of the scores that a layer may give an attention function -> part of the refusal
TERMS = {
    "position_bias": "adds a position bias to the scores of its Identity",
    "sinks": "has attention sinks in its Identity",
    "s_aux": "has attention sinks in its Identity",
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("attention", FUNCTIONS)
def test_a_term_that_packed_attention_would_leave_out_is_refused(attention, term):
    query, key, value = torch.randn(3, 1, 2, sum(LENGTHS), 16)
    batch = collate_packed(documents(), pad_token_id=0)
    with pytest.raises(UserError, match=TERMS[term]):
        FUNCTIONS[attention](nn.Identity(), query, key, value, None, **{**batch, term: torch.ones(1)})


@pytest.mark.parametrize("sinks", ["sinks", "s_aux"])
def test_sinks_that_sdpa_would_ignore_are_an_error(sinks):
    query, key, value = torch.randn(3, 1, 2, 8, 16)
    with pytest.raises(ValueError, match="sdpa has no attention sinks"):
        FUNCTIONS["per_document"](nn.Identity(), query, key, value, None, **{sinks: torch.ones(2)})


def test_an_error_of_a_model_without_its_mask_is_one_sentence():
    """MPT reads its mask, which our attention does without."""
    config = transformers.MptConfig(vocab_size=128, d_model=64, n_layers=2, n_heads=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="per_document")
    prepare_masks(model)
    with pytest.raises(UserError, match=r"data\.packing: this MptForCausalLM takes no packed rows: 'NoneType'"):
        check_document_isolation(model, multiple_of=16)


def test_a_layer_without_the_window_of_its_mask_is_refused():
    """The model makes a local mask for a layer that attends without a window."""
    model = make("mistral", attn_implementation="per_document")
    install_packing_checks(model)
    for layer in model.model.layers:
        layer.self_attn.config = make("llama").config
        layer.self_attn.config._attn_implementation = "per_document"
    with pytest.raises(UserError, match="own attention pattern"):
        check_document_isolation(model, multiple_of=16)


def test_after_a_failed_packed_call_unpacked_rows_are_masked_again():
    model = make("mistral", attn_implementation="per_document").eval()
    install_packing_checks(model)
    expected = model(**tiny_models.batch(), use_cache=False).logits
    with pytest.raises(TypeError):
        model(**packed(), use_cache=False, output_hidden_states=object(), return_dict=[], cu_seq_lens_q=None, labels=3)
    torch.testing.assert_close(model(**tiny_models.batch(), use_cache=False).logits, expected)
