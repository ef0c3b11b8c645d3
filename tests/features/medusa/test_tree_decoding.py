"""Greedy Medusa decoding equals plain greedy decoding, token for token; candidate trees."""

import itertools

import pytest
import torch
from support.models.tiny_models import make

from ligertune.decode.speculative.candidate_tree import CandidateTree, Typical, best_paths, chain
from ligertune.features.medusa.decode.tree_decoding import decode_with_heads
from ligertune.features.medusa.heads import MedusaHeads
from ligertune.features.output_head import logit_transform

HEADS, NEW = 3, 32
WIDE = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth) if sum(path) < 4]
TREES = {"chain": chain(HEADS), "tree": WIDE}
# full attention, a window shorter than the text, alternating windows with a soft cap, a scale (tied), partial rope
FAMILIES = ("mistral", "gemma2")  # a sliding window; soft caps
SLOW_FAMILIES = ("llama", "llama_tied", "cohere2", "mixtral", "phi3_partial", "qwen3")


def sharp(family: str):
    """Return a random model with clear preferences, whose greedy text does not repeat one token."""
    model = make(family, seed=3, **({"tie_word_embeddings": False} if family == "gemma2" else {})).eval()
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding  # scaling it would make the model repeat its input
    with torch.no_grad():
        for parameter in model.parameters() if tied else (embedding,):
            if parameter.ndim > 1 and not (tied and parameter is embedding):
                parameter.mul_(8)
    return model


def trained_heads(model, prompts: list[list[int]]) -> MedusaHeads:
    """Return heads fitted to the model's own greedy text: they are often right, and deep paths are accepted."""
    heads = MedusaHeads(HEADS, 1, model.get_output_embeddings().weight.detach(), own_lm_head=True)
    texts = torch.tensor([prompt + plain(model, prompt, NEW) for prompt in prompts])
    with torch.no_grad():
        hidden = model.base_model(input_ids=texts)[0]
    optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-2)
    for _ in range(80):
        loss = sum(
            torch.nn.functional.cross_entropy(head(hidden[:, : -k - 1]).flatten(0, 1), texts[:, k + 1 :].flatten())
            for k, head in enumerate(heads, start=1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads


def plain(model, prompt: list[int], new: int, eos: tuple[int, ...] = ()) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=list(eos) or None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_FAMILIES)])
@pytest.mark.filterwarnings("error::FutureWarning")  # the cache keyword that transformers 5.24 renamed
def test_greedy_text_equals_plain_decoding(family):
    """Untrained and trained heads, a chain and a tree, one prompt and three of different lengths."""
    model = sharp(family)
    model.generation_config.eos_token_id = None
    prompts = prompts_of((9, 4, 13))
    expected = [plain(model, prompt, NEW) for prompt in prompts]
    assert all(len(set(text)) > 5 for text in expected)  # no text that every candidate would match
    transform = logit_transform(model)
    untrained = MedusaHeads(HEADS, 1, model.get_output_embeddings().weight.detach(), own_lm_head=False)
    trained = trained_heads(model, prompts_of((9,)))
    for heads, name in itertools.product((untrained, trained), TREES):
        tree = CandidateTree.from_paths(TREES[name])
        together = decode_with_heads(model, heads, transform, prompts, tree, max_new_tokens=NEW)
        assert together.tokens == expected
        if (heads is trained) == (name == "tree"):  # each heads and each tree once
            single = decode_with_heads(model, heads, transform, prompts[:1], tree, max_new_tokens=NEW)
            assert single.tokens == expected[:1]
    assert single.accepted_length > 2.0  # the heads know this text: the cache was truncated at many depths


def test_decoding_stops_inside_a_path():
    """An end-of-text token, or the limit, in the middle of what one pass accepts."""
    model = sharp("llama")
    (prompt,) = prompts_of((9,))
    heads, transform = trained_heads(model, [prompt]), logit_transform(model)
    whole = plain(model, prompt, NEW)
    eos = (whole[17],)
    for new in (1, 2, 3, 18, NEW):
        found = decode_with_heads(
            model, heads, transform, [prompt], CandidateTree.from_paths(WIDE), max_new_tokens=new, stop_at=eos
        )
        assert found.tokens == [plain(model, prompt, new, eos)]
        assert found.accepted_length == len(found.tokens[0]) / found.passes[0]


def test_typical_acceptance_is_greedy_at_low_temperature():
    model = sharp("llama")
    prompts = prompts_of((9, 4))
    heads = trained_heads(model, prompts_of((9,)))
    transform, tree = logit_transform(model), CandidateTree.from_paths(WIDE)
    cold = Typical(temperature=1e-4)
    found = decode_with_heads(model, heads, transform, prompts, tree, max_new_tokens=NEW, acceptance=cold)
    assert found.tokens == [plain(model, prompt, NEW) for prompt in prompts]


def test_a_tree_by_hand():
    """A root with two candidates of head 1, and one of head 2 after the first."""
    tree = CandidateTree.from_paths([(0,), (1,), (0, 0)])
    assert tree.mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert tree.depths.tolist() == [0, 1, 1, 2]
    assert tree.parents.tolist() == [0, 0, 0, 1]
    assert (tree.heads.tolist(), tree.ranks.tolist()) == ([0, 0, 1], [0, 1, 0])
    assert sorted(tree.leaves.tolist()) == [[0, 1, 3], [0, 2, -1]]
    with pytest.raises(ValueError, match="every prefix"):
        CandidateTree.from_paths([(0, 0)])


def test_the_tree_has_the_most_likely_paths():
    """0.6 and 0.3 for head 1; 0.5 and 0.2 for head 2: the paths are worth 0.6, 0.3, 0.3, 0.15, 0.12, 0.06."""
    accuracy = [[0.6, 0.3, 0.0], [0.5, 0.2, 0.0]]
    assert best_paths(accuracy, 2) == [(0,)]
    assert best_paths(accuracy, 4) == [(0,), (1,), (0, 0)]
    assert best_paths(accuracy, 6) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    assert len(best_paths(accuracy, 500)) == 6  # ranks that are never right are no nodes
    assert best_paths([[0.0]], 8) == [(0,)]
