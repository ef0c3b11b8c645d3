"""Decoding with a draft head: greedy text equals that of plain decoding, and sampled text has its distribution."""

import itertools

import pytest
import torch
from support.models.tiny_models import make
from support.tasks.draft_heads import fitted_head, spaced_ids

from ligertune.decode.speculative.candidate_tree import CandidateTree, chain
from ligertune.features.draft.decode.draft_decoding import TargetModel, decode_with_draft
from ligertune.features.draft.draft_config import draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.output_head import logit_transform

DEPTH, NEW, LAYERS = 3, 40, 5
WIDE = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth) if sum(path) < 3]
TREES = {"chain": CandidateTree.from_paths(chain(DEPTH)), "tree": CandidateTree.from_paths(WIDE)}


def sharp(family: str, **changes: object):
    """Return a random model with clear preferences, whose greedy text does not repeat one token."""
    model = make(family, seed=3, num_hidden_layers=LAYERS, **changes).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
    model.generation_config.eos_token_id = None
    return model


def plain(model, prompt: list[int], new: int, eos: tuple[int, ...] = ()) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=list(eos) or None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def prompt_of(length: int, seed: int = 5) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_greedy_text_equals_plain_decoding(family):
    """A random and a fitted head, with a reduced and the whole vocabulary, one and two layers, a chain and a tree."""
    changes = {"tie_word_embeddings": False} if family == "gemma2" else {}
    model = sharp(family, **changes)
    prompt = prompt_of(9)
    expected = plain(model, prompt, NEW)
    assert len(set(expected)) > 5  # no text that every draft would match
    target = TargetModel(model, logit_transform(model))
    lengths = {}
    for size, num_layers in ((40, 1), (128, 2)):
        config = draft_config_of(model.config, draft_vocab_size=size, num_layers=num_layers)
        ids = spaced_ids(config) if size == 40 else None
        known = fitted_head(model, config, ids, prompt + expected)
        for (name, tree), head in itertools.product(TREES.items(), (DraftHead(config, ids), known)):
            found = decode_with_draft(target, head, prompt, tree, max_new_tokens=NEW)
            assert found.tokens == expected
            lengths[size, name, head is known] = found.accepted_length
    # the head has learnt the text: what it drafts is accepted, and so its cache was right at many lengths
    assert lengths[128, "chain", True] > 3.0
    assert lengths[128, "chain", True] > lengths[128, "chain", False] + 1
    assert lengths[40, "chain", True] > lengths[40, "chain", False]


def test_decoding_stops_inside_a_path():
    """An end-of-text token, or the limit, in the middle of what one pass accepts."""
    model = sharp("llama")
    prompt = prompt_of(9)
    whole = plain(model, prompt, NEW)
    target = TargetModel(model, logit_transform(model))
    head = fitted_head(model, draft_config_of(model.config), None, prompt + whole)
    eos = (whole[17],)
    for new in (1, 2, 3, 18, NEW):
        found = decode_with_draft(target, head, prompt, TREES["tree"], max_new_tokens=new, stop_at=eos)
        assert found.tokens == plain(model, prompt, new, eos)
    one = decode_with_draft(target, head, prompt[:1], TREES["chain"], max_new_tokens=NEW)
    assert one.tokens == plain(model, prompt[:1], NEW)  # a prompt of one token
