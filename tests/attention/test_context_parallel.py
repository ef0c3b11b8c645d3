"""Ranks that each compute a part of a packed row: together they have its loss and its gradients."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import on_ranks
from support.models import tiny_models
from support.tasks import packed_rows
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligertune.data.batching.collate import Batcher, collate_packed
from ligertune.data.batching.context_parallel import ContextParallelSplit, document_runs, rank_pieces
from ligertune.data.examples import Example
from ligertune.errors import UserError
from ligertune.patching.packing_checks import prepare_masks
from ligertune.patching.patch import patch
from ligertune.training import checks
from ligertune.training.checks import EXACT, ROUNDED, context_parallel_error

RANKS = 3  # pieces of 13 tokens: documents of 19 and 24 lie in several, and three begin and end in one
ROW = 6 * 13
# plain, layers run again in the backward, windows in some layers, soft caps, windows
WAYS = ("llama", "llama checkpointed", "qwen2", "gemma2", "mistral")


def row_of(examples: list[Example]) -> dict:
    return collate_packed(examples, pad_token_id=0, pad_to_multiple_of=ROW)


def one_document() -> list[Example]:
    """As long as the row: each rank but the first attends to others' tokens."""
    parts = packed_rows.documents()
    more = np.full(ROW - sum(packed_rows.LENGTHS), 3)
    return [Example(*(np.concatenate([*(part[place] for part in parts), more]) for place in (0, 1)), "")]


def ready(family: str) -> PreTrainedModel:
    """As a run makes it."""
    model = packed_rows.make(family, attn_implementation="per_document")
    patch(model)
    prepare_masks(model)
    return model


def loss_and_gradients(model: torch.nn.Module, batch: dict) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=40, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest number of its tensor."""
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


@dataclass(frozen=True)
class OfOtherLabels(ContextParallelSplit):
    """As for a model that shifts the labels itself."""

    def cut(self, batch: dict) -> dict:
        return {**super().cut(batch), "shift_labels": None}


@dataclass(frozen=True)
class OfOtherKeys(ContextParallelSplit):
    """As where gathered keys stand in another order."""

    def cut(self, batch: dict) -> dict:
        part = super().cut(batch)
        return {**part, "key_rows": part["key_rows"].roll(1)}


def noticed(model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """What the check before the first step finds: logits and loss, for sound parts and for others."""
    found = {}
    for kind in (ContextParallelSplit, OfOtherLabels, OfOtherKeys):
        split = kind(dist.group.WORLD)
        batcher = Batcher((), packed=True, multiple_of=ROW // 2, pad_token_id=0, index_labels=False,
                          device=torch.device("cpu"), context_parallel=split)  # fmt: skip
        found[kind.__name__] = context_parallel_error(model, batcher, split, vocab_size=tiny_models.VOCAB)
    return found


def compare(rank: int) -> dict[str, object]:
    """What each of the ranks does. Returns {family/rows: furthest}."""
    dist.init_process_group("gloo")
    parts, found = ContextParallelSplit(dist.group.WORLD), {}
    for way in WAYS:
        family, _, checkpointed = way.partition(" ")
        model = ready(family)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, examples in {"documents": packed_rows.documents(), "one": one_document()}.items():
            whole = loss_and_gradients(model, row_of(examples))
            mine = loss_and_gradients(model, parts.cut(row_of(examples)))
            for tensor in mine.values():
                dist.all_reduce(tensor)
            found[f"{way}: {name}"] = furthest(mine, whole)
    return found | noticed(ready("llama"))


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return on_ranks(RANKS, compare)[0]


@pytest.mark.parametrize("rows", ["documents", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_parts_add_up_to_the_loss_and_the_gradients_of_the_whole(way, rows, found):
    """float32: what differs is the order in which numbers are added."""
    assert found[f"{way}: {rows}"] < 2e-5


def test_what_a_part_is_not_given_right_is_noticed_before_the_first_step(found):
    """One of 26 labels would be missing on each rank: a loss that is a little lower, and no complaint."""
    assert max(found["ContextParallelSplit"]) < EXACT[0] / 10
    assert found["OfOtherLabels"][1] > 2 * ROUNDED[1]
    assert found["OfOtherKeys"][0] > 2 * ROUNDED[0]


@pytest.mark.parametrize("error", [(1.0, 0.0), (0.0, 1.0), (0.0, math.nan)])
def test_an_error_of_the_logits_or_of_the_loss_is_refused(error, monkeypatch):
    monkeypatch.setattr(checks, "context_parallel_error", lambda *_, **__: error)
    plan = SimpleNamespace(precision=SimpleNamespace(half=True), model_family="llama")
    with pytest.raises(UserError, match="a part of a row does not give"):
        checks.check_context_parallel(plan, nn.Identity(), SimpleNamespace(context_parallel=object()), vocab_size=9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_is_one_ranks_and_sees_its_documents(ranks):
    lengths = (5, 1, 40, 2)
    pieces = [rank_pieces(rank, ranks, 48) for rank in range(ranks)]
    runs = [run for rank in range(ranks) for run in document_runs(lengths, pieces[rank])]
    tokens = [token for _, first, last in runs for token in range(first, last)]
    assert sorted(tokens) == list(range(48))
    begins = [0, 5, 6, 46]
    assert all(begin == max(b for b in begins if b <= first) for begin, first, _ in runs)
    assert all(last <= next((b for b in begins if b > first), 48) for _, first, last in runs)


def test_labelled_rows_of_a_part_predict_its_shifted_labels():
    parts = ContextParallelSplit(SimpleNamespace(rank=lambda: 1, size=lambda: RANKS))
    documents, options = packed_rows.documents(), {"index_labels": True, "rows_multiple_of": 1}
    part = Batcher(documents, packed=True, multiple_of=ROW, pad_token_id=0, device=torch.device("cpu"),
                   context_parallel=parts, **options)([np.arange(len(documents))])  # fmt: skip
    assert part["labelled_rows"].tolist() == torch.nonzero(part["shift_labels"][0] != -100).flatten().tolist()


def test_ranks_have_as_much_attention_to_do():
    work = [sum(sum(range(first + 1, last + 1)) for first, last in rank_pieces(rank, 4, 64)) for rank in range(4)]
    assert len(set(work)) == 1


def test_a_row_that_pieces_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="a row of 50 tokens cannot be cut into 8 pieces"):
        rank_pieces(0, 4, 50)
