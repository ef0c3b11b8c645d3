"""Decoding with a draft head: greedy text equals that of plain decoding, and sampled text has its distribution."""

import itertools

import pytest
import torch
from support.models.tiny_models import make
from support.tasks.draft_heads import fitted_head, logits_of_steps, spaced_ids

from ligertune.decode.answers.token_choice import TokenFilters
from ligertune.decode.speculative.candidate_tree import CandidateTree, chain
from ligertune.features.draft.decode.draft_decoding import AcceptanceCounts, TargetModel, decode_with_draft
from ligertune.features.draft.decode.drafter import Drafter
from ligertune.features.draft.decode.rejection_sampling import AcceptedPath
from ligertune.features.draft.draft_config import draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.target_states import StateCapture
from ligertune.features.output_head import logit_transform

DEPTH, NEW, LAYERS = 3, 30, 5
WIDE = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth) if sum(path) < 3]
TREES = {"chain": CandidateTree.from_paths(chain(DEPTH)), "tree": CandidateTree.from_paths(WIDE)}


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: the products are so small that two would wait for each other, minutes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mistral"))]
)
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


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_drafts_are_those_of_training(name, num_layers):
    """Each path of a tree has the tokens of training's steps, which read the path as the text: positions and masks."""
    model = make("llama", seed=3, num_hidden_layers=3).eval()
    config = draft_config_of(model.config, num_layers=num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        head = DraftHead(config)
    with torch.no_grad():
        for layer in head.decoder_layers():
            layer.self_attn.q_proj.weight.mul_(30)  # positions decide which tokens are attended to
            layer.self_attn.o_proj.weight.mul_(10)
    embedding = model.get_input_embeddings().weight.detach()
    text = torch.tensor(prompt_of(12))
    with torch.no_grad(), StateCapture(model, config.layer_ids) as capture:
        model(input_ids=text[None])
        states = capture.take()[0, :-1]
        drafter = Drafter(head, embedding, TREES[name], TokenFilters(0.0, top_k=0, top_p=1.0, min_p=0.0))
        drafter.read(states[:5], text[1:6])  # in two parts, as after a pass that accepted some drafts
        drafter.read(states[5:], text[6:])
        drafted = drafter.draft(text[-1]).tokens
        assert torch.equal(drafter.draft(text[-1]).tokens, drafted)  # the first drafts have left the cache
    tree = TREES[name]
    for leaf in tree.leaves:
        path = leaf[leaf >= 0]
        whole = torch.cat([text, drafted[path[1:]], text[:1]])
        # the last row of the text does not see the rows after it, which need some state
        padded = torch.cat([states, torch.zeros(len(path), states.shape[1])])
        with torch.no_grad():
            steps = logits_of_steps(head, embedding, whole, padded, len(path) - 1)
        for logits, node in zip(steps, path[1:].tolist(), strict=True):
            rank = int(tree.ranks[node - 1])
            assert drafted[node] == logits[len(states) - 1].topk(rank + 1).indices[rank]


# ---- sampling

TOKENS = 6


def markov(seed: int = 1):
    """Return a target whose next token depends on the last one only: its attention adds nothing to the states.

    So all transitions of one long text are draws from (V, V) known distributions.
    """
    model = make("llama", seed=seed, num_hidden_layers=3, vocab_size=TOKENS, pad_token_id=None).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        model.lm_head.weight.mul_(4)
    return model


def random_head(model, size: int) -> DraftHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        config = draft_config_of(model.config, draft_vocab_size=size)
        head = DraftHead(config, torch.arange(size) + 1 if size < TOKENS else None)
        with torch.no_grad():
            head.lm_head.weight.mul_(3)  # clear preferences, which are not the target's
    return head


def transitions(model, temperature: float) -> torch.Tensor:
    """Return the distribution (V, V) of the token after each token."""
    with torch.no_grad():
        logits = model(input_ids=torch.arange(TOKENS)[:, None]).logits[:, 0]
    return torch.softmax(logits / temperature, dim=-1)


def distance(tokens: list[int], expected: torch.Tensor) -> float:
    """Return how many standard deviations the chi-squared statistic of a text's transitions lies above its mean."""
    counts = torch.zeros(TOKENS, TOKENS)
    for pair in itertools.pairwise(tokens):
        counts[pair] += 1
    mean = counts.sum(1, keepdim=True) * expected
    freedom = TOKENS * (TOKENS - 1)
    statistic = ((counts - mean) ** 2 / mean).sum()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize(
    ("name", "temperature", "tokens"),
    [
        ("chain", 1.0, 500),
        pytest.param("tree", 0.7, 800, marks=pytest.mark.slow),
        pytest.param("tree", 1.0, 6000, marks=pytest.mark.slow),
    ],
)
def test_sampled_text_follows_the_distribution_of_the_target(name, temperature, tokens):
    """The head drafts four of six tokens by preferences of its own."""
    model = markov()
    torch.manual_seed(7)
    target = TargetModel(model, logit_transform(model))
    head = random_head(model, 4)
    found = decode_with_draft(target, head, [3], TREES[name], max_new_tokens=tokens, temperature=temperature)
    text = [3, *found.tokens]
    assert abs(distance(text, transitions(model, temperature))) < 4
    assert distance(text, transitions(model, 2 * temperature)) > 10  # so a wrong distribution is seen
    assert 1.2 < found.accepted_length < 3.5  # drafts were accepted and rejected


def test_sampled_text_with_top_p_follows_the_distribution_that_is_cut_off():
    """Of target and head: without it for the head, drafts would be drawn that the target never accepts."""
    model = markov()
    torch.manual_seed(7)
    target = TargetModel(model, logit_transform(model))
    head = random_head(model, 4)
    found = decode_with_draft(target, head, [3], TREES["tree"], max_new_tokens=250, temperature=1.0, top_p=0.7)
    expected = cut_off(transitions(model, 1.0), 0.7)
    counts = torch.zeros(TOKENS, TOKENS)
    for pair in itertools.pairwise([3, *found.tokens]):
        counts[pair] += 1
    assert (counts[expected == 0] == 0).all() and (expected == 0).sum() > 6
    mean = counts.sum(1, keepdim=True) * expected
    kept = mean > 0
    statistic = ((counts - mean)[kept] ** 2 / mean[kept]).sum()
    freedom = int(kept.sum()) - int((counts.sum(1) > 0).sum())
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5
    assert 1.2 < found.accepted_length < 3.9


def cut_off(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return each distribution (V, V) without its unlikely tokens, by loops."""
    found = torch.zeros_like(probabilities)
    for token, row in enumerate(probabilities):
        mass = 0.0
        for place in row.argsort(descending=True).tolist():
            if mass < top_p:
                found[token, place] = row[place]
            mass += float(row[place])
    return found / found.sum(1, keepdim=True)


def test_accepted_drafts_are_counted_by_position():
    """Two of three accepted; all; none; and one accepted, after which the text ends before the second."""
    counts = AcceptanceCounts.of_depth(3)
    for accepted, reached in ((2, 3), (3, 3), (0, 3), (1, 1)):
        counts.record(AcceptedPath(list(range(accepted + 1)), 0, [0.5] * min(accepted + 1, 3)), reached=reached)
    assert counts.trials == [4, 2, 2]
    assert counts.accepted == [3, 2, 1]
    assert counts.shares == [0.75, 1.0, 0.5]
    assert counts.expected_shares == [0.5, 0.5, 0.5]


def test_measured_acceptance_is_the_expected_one():
    """Σ min(p, q) of each forward pass against the share of accepted drafts, for each position of the chain."""
    check_acceptance(steps=200)


@pytest.mark.slow
def test_measured_acceptance_is_the_expected_one_in_20_000_steps():
    check_acceptance(steps=20_000)


def check_acceptance(steps: int) -> None:
    model = make("llama", seed=1, num_hidden_layers=3).eval()
    model.generation_config.eos_token_id = None
    torch.manual_seed(3)
    target = TargetModel(model, logit_transform(model))
    config = draft_config_of(model.config, draft_vocab_size=40)
    head = DraftHead(config, spaced_ids(config))
    counts = AcceptanceCounts.of_depth(DEPTH)
    done = 0
    while done < steps:
        found = decode_with_draft(
            target, head, prompt_of(4, seed=done), TREES["chain"], max_new_tokens=100, temperature=1.0
        )
        counts.add(found.counts)
        done += found.passes
    assert counts.trials[0] == done
    assert counts.trials[1:] == counts.accepted[:-1]
    for position in range(DEPTH):
        share = counts.shares[position]
        expected = counts.expected_shares[position]
        noise = (expected * (1 - expected) / counts.trials[position]) ** 0.5  # an upper bound of the standard deviation
        assert abs(share - expected) < 4 * noise, f"position {position}: {share:.4f}, expected {expected:.4f}"
