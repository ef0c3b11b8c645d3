"""Acceptance rules, at probabilities just above and just below each bound."""

import pytest
import torch
from torch import Tensor

from ligertune.decode.speculative.candidate_tree import CandidateTree, Greedy, Typical
from ligertune.decode.speculative.plain_decoding import prompt_token_ids

# A candidate passes above min(epsilon, delta exp(-H)) with epsilon = 0.09, delta = 0.3:
#   sure      p = (0.9, x, 0.1 - x):  H is at most 0.41 nats, delta exp(-H) at least 0.2, so the bound is epsilon, 0.09.
#   unsure    p = (x, 49 times (1 - x) / 49):  at x = 0.006, H = 3.904 and delta exp(-H) = 0.00605.


def sure(x: float) -> list[float]:
    return [0.9, x, 0.1 - x, *[0.0] * 48]


def unsure(x: float) -> list[float]:
    return [0.0, x, *[(1 - x) / 49] * 49]


def logits(*rows: list[float], temperature: float) -> Tensor:
    """(1, N, V) of these probabilities at this temperature."""
    return temperature * torch.tensor([rows]).log()


def length(candidate: list[float], temperature: float = 1.0) -> int:
    """Return how many of two nodes are accepted: the root and its candidate, token 1."""
    rule, tree = Typical(temperature=temperature), CandidateTree.from_paths([(0,)])
    last = [0.0] * 50 + [1.0]  # token 50 follows the candidate
    found = rule.accept(tree, torch.tensor([[7, 1]]), logits(candidate, last, temperature=temperature))
    assert found.next_tokens.item() == 50 or found.lengths.item() == 1
    return int(found.lengths)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_the_bound_is_epsilon_if_the_model_is_sure(temperature):
    assert length(sure(0.0905), temperature) == 2
    assert length(sure(0.0895), temperature) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_the_bound_is_delta_times_exp_of_minus_the_entropy_if_the_model_is_unsure(temperature):
    """49 equal tokens: exp(-H) is about 1 / 49.6, so 0.3 times it about 0.00605."""
    assert length(unsure(0.0062), temperature) == 2
    assert length(unsure(0.0058), temperature) == 1


def test_the_longest_accepted_path_wins_and_the_token_after_it_follows():
    """A root with two candidates, and one candidate after the second. Greedy accepts the most likely tokens only."""
    tree = CandidateTree.from_paths([(0,), (1,), (1, 0)])  # nodes: root, a, b, and c after b
    tokens = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 4], [9, 1, 5, 3]])
    likeliest = torch.tensor([[2, 0, 3, 6], [2, 0, 3, 6], [1, 8, 3, 6]])
    found = Greedy().accept(tree, tokens, torch.nn.functional.one_hot(likeliest, 10).float())
    assert found.lengths.tolist() == [3, 2, 2]
    kept = [nodes[:n] for nodes, n in zip(found.nodes.tolist(), found.lengths.tolist(), strict=True)]
    assert kept == [[0, 2, 3], [0, 2], [0, 1]]
    assert found.next_tokens.tolist() == [6, 3, 8]


def test_the_prompt_of_a_text_that_is_trained_whole_is_its_first_quarter():
    ids = list(range(40))
    assert prompt_token_ids(ids, [-100, -100, *ids[2:]]) == [0, 1]
    assert prompt_token_ids(ids, ids) == prompt_token_ids(ids, [-100, *ids[1:]]) == list(range(10))
    assert len(prompt_token_ids(range(400), [-100] * 400)) == 400
