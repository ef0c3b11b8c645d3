"""Preference pairs and answers with a label: labels, truncation, dropped rows, cache, packing and batches."""

import functools
import json

import numpy as np
import pytest
import torch
from support.data.row_files import write_rows

from ligertune.data.batching.collate import Batcher
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Example, Examples
from ligertune.data.prepare import PreparedData
from ligertune.data.statistics import epoch_rows, summarize_data
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.errors import UserError
from ligertune.planning.options import BatchLayoutOptions
from ligertune.recipe.schema import Recipe


def turns(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def pairs(n: int = 12) -> list[dict]:
    return [{"prompt": f"Say {i}.", "chosen": f" {i}" * (i % 5 + 1), "rejected": " no" * (i % 3 + 1)} for i in range(n)]


@pytest.fixture
def of_pairs(prepared):
    return functools.partial(prepared, content="pairs")


def trained(tokenizer, document: Example) -> str:
    return tokenizer.decode(document.labels[document.labels != IGNORE_INDEX])


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini"])
def test_each_side_is_rendered_and_labelled_as_its_conversation(name, of_pairs, prepared, tokenizer_named):
    """A side is the same sequence as the conversation alone, in which the prompt's answers have weight 0."""
    tokenizer = tokenizer_named(name)
    prompt = turns("One?", "First.", "Two?")
    answers = {"chosen": turns("Two?", "It is 2.")[1:], "rejected": turns("Two?", "No: 3", "Sure?", "Yes 4")[1:]}
    example = of_pairs([{"prompt": prompt, **answers}], tokenizer=tokenizer).train[0]
    prompt[1]["weight"] = 0
    for document, answer in zip(example.documents(), answers.values(), strict=True):
        alone = prepared([{"messages": [*prompt, *answer]}], tokenizer=tokenizer).train[0]
        assert np.array_equal(document.input_ids, alone.input_ids)
        assert np.array_equal(document.labels, alone.labels)
        assert "First" not in trained(tokenizer, document) and "Two" not in trained(tokenizer, document)
    chosen, rejected = (trained(tokenizer, document) for document in example.documents())
    assert "It is 2." in chosen
    assert "No: 3" in rejected and "Yes 4" in rejected and "Sure" not in rejected


def test_texts_are_joined_and_only_answers_are_trained(of_pairs, stories):
    example = of_pairs([{"prompt": "The sky is", "chosen": " blue.", "rejected": " green, or so."}]).train[0]
    chosen, rejected = example.documents()
    assert len(chosen.input_ids) == example.first_length
    assert stories.decode(chosen.input_ids) == "<s> The sky is blue.</s>"
    assert trained(stories, chosen).strip() == "blue.</s>" and trained(stories, rejected).strip() == "green, or so.</s>"
    assert chosen.source == rejected.source == example.source
    assert (chosen.first_length, chosen.documents()) == (0, [chosen])


@pytest.mark.parametrize(
    ("prompt", "answer", "is_noted"),
    [("Say it.", "No.", True), ("Say it", "no", True), ("Say it.\n", "No.", False), ("Say it.", " No.", False),
     ("Say it. Answer:", "No.", False), ("[INST] Say it. [/INST]", "No.", False), ("言って。", "いいえ", True)],
)  # fmt: skip
def test_prompts_that_run_into_their_answers_are_noted(prompt, answer, is_noted, of_pairs, prepared):
    texts = {"prompt": prompt, "chosen": answer, "rejected": answer + " Or not."}
    few = {"prompt": "Say it.", "chosen": " Yes.", "rejected": " No."}
    for rows, noted in (([texts, texts, few], is_noted), ([texts, few, few], False)):
        notes = " ".join(of_pairs(rows).report.notes)
        assert ("without white space" in notes and f'{prompt[-12:]}{answer}"' in notes) == noted
    report = prepared([{"prompt": prompt, "completion": answer}] * 3).report
    assert any("3 of 3 prompts" in note for note in report.notes) == is_noted
    under_chat = of_pairs([texts] * 3, prompt_template="chat").report
    assert not any("white space" in note for note in under_chat.notes)


def test_train_on_last_trains_the_last_turn_only(of_pairs, tokenizer_named):
    tokenizer = tokenizer_named("qwen2.5")
    row = {"chosen": turns("Q", "A one", "R", "B two"), "rejected": turns("Q", "C three", "R", "D four")}
    chosen, rejected = of_pairs([row], tokenizer=tokenizer, train_on="last").train[0].documents()
    assert [trained(tokenizer, side) for side in (chosen, rejected)] == ["B two<|im_end|>", "D four<|im_end|>"]


def test_counts_of_both_sides(of_pairs):
    train = of_pairs(pairs()).train
    documents = [document for example in train for document in example.documents()]
    lengths = np.array([len(document.input_ids) for document in documents])
    n_trained = np.array([(document.labels != IGNORE_INDEX).sum() for document in documents])
    assert np.array_equal(train.document_lengths, lengths)
    assert np.array_equal(train.lengths, lengths[::2] + lengths[1::2])
    assert np.array_equal(train.first_lengths, lengths[::2])
    assert np.array_equal(train.longest_documents, np.maximum(lengths[::2], lengths[1::2]))
    assert np.array_equal(train.squared_lengths, lengths[::2] ** 2 + lengths[1::2] ** 2)
    assert np.array_equal(train.trained, n_trained[::2] + n_trained[1::2])
    assert np.array_equal(train.first_trained, n_trained[::2])
    assert (train.documents_per_example, set(train.desirable)) == (2, {-1})


def test_examples_that_are_no_pairs_count_as_one_sequence(prepared):
    train = prepared([{"prompt": "p", "completion": "c" * n} for n in (1, 9)]).train
    assert np.array_equal(train.document_lengths, train.lengths)
    assert np.array_equal(train.squared_lengths, train.lengths**2)
    assert (train.documents_per_example, set(train.first_trained)) == (1, {0})


@pytest.mark.parametrize("long", [0, 1], ids=["chosen", "rejected"])
def test_overlength_decides_on_the_longer_side(of_pairs, long):
    answers = [" a" * 40, " b"]
    row = {"prompt": "p", "chosen": answers[long], "rejected": answers[1 - long]}
    whole = of_pairs(pairs(3)).train
    limit = int(whole.longest_documents.max())
    dropped = of_pairs([*pairs(3), row], max_length=limit).report
    assert (dropped.dropped, dropped.overlength, dropped.examples) == ({"too long": 1}, 1, 3)
    cut = of_pairs([*pairs(3), row], max_length=limit, on_overlength="truncate")
    assert (cut.report.truncated, len(cut.train), int(cut.train.longest_documents.max())) == (1, 4, limit)
    full, kept = of_pairs([row]).train[0].documents(), cut.train[3].documents()
    for name in ("input_ids", "labels"):
        assert np.array_equal(getattr(kept[long], name), getattr(full[long], name)[:limit])
        assert np.array_equal(getattr(kept[1 - long], name), getattr(full[1 - long], name))
    with pytest.raises(UserError, match=rf"d\.jsonl:4: \d+ tokens, more than data\.max_length: {limit}"):
        of_pairs([*pairs(3), row], max_length=limit, on_overlength="error")


def test_pairs_that_truncation_spoils_are_dropped(of_pairs):
    prompt = "The same long prompt"
    rows = [
        {"prompt": prompt, "chosen": " a" * 40 + "x", "rejected": " a" * 40 + "y"},
        {"prompt": prompt * 9, "chosen": " a", "rejected": " b"},
        *pairs(3),
    ]
    limit = len(of_pairs([{"prompt": prompt, "chosen": " a" * 40, "rejected": " b"}]).train[0].documents()[0].labels)
    report = of_pairs(rows, max_length=limit - 2, on_overlength="truncate").report
    assert report.dropped == {"equal answers": 1, "cut before the answer": 1}


def test_useless_pairs_are_dropped_and_counted_with_their_source(of_pairs, tmp_path):
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"prompt": "p", "chosen": "a", "rejected": ""},
        {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 5, "score_rejected": 5},
        {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 4, "score_rejected": 5},
    ]
    report = of_pairs(rows).report
    assert report.dropped == {"equal answers": 1, "empty answer": 1, "equal scores": 1}
    assert report.first_dropped["equal scores"] == f"{tmp_path}/d.jsonl:3 (both 5)"
    assert (report.rows_read, report.examples) == (4, 1)
    with pytest.raises(UserError, match=r"d\.jsonl:1: equal answers"):
        of_pairs(rows, dataset={"on_bad_row": "error"})


def test_the_cache_keeps_pairs_and_labels(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    labelled = [{"prompt": "p", "completion": f"c {n}", "label": n % 2} for n in range(6)]
    for content, rows in (("pairs", pairs()), ("labelled", labelled)):
        made, again = (prepared(write_rows(tmp_path / f"{content}.jsonl", rows), content=content) for _ in range(2))
        fresh = prepared(write_rows(tmp_path / f"{content}.jsonl", rows), content=content, cache=False)
        assert [part.report.sets[0].cached for part in (made, again, fresh)] == [False, True, False]
        assert made.train.fingerprint == again.train.fingerprint == fresh.train.fingerprint
        for name in ("first_lengths", "first_trained", "desirable"):
            assert np.array_equal(getattr(again.train, name), getattr(fresh.train, name)), name


def test_the_fingerprint_depends_on_where_a_pair_is_cut_and_on_labels():
    ids = np.arange(6, dtype=np.int32)
    variants = [{}, {"first_length": 2}, {"first_length": 3}, {"desirable": 0}, {"desirable": 1}]
    assert len({Examples([Example(ids, ids, "", **more)]).fingerprint for more in variants}) == len(variants)


def test_labelled_answers_have_their_label(prepared):
    rows = [{"prompt": "p", "completion": f"c {n}", "label": bool(n % 3)} for n in range(6)]
    train = prepared([*rows, {"prompt": "p", "completion": "c", "label": 7}], content="labelled")
    assert train.train.desirable.tolist() == [example.desirable for example in train.train] == [0, 1, 1, 0, 1, 1]
    assert train.report.dropped == {"no label": 1}


def test_splits_and_weights_keep_pairs(of_pairs, tmp_path):
    data = of_pairs(pairs(20), val_split=0.25, dataset={"weight": 2})
    assert (len(data.train), len(data.eval)) == (30, 5)
    whole = of_pairs(pairs(20)).train
    by_source = {example.source: example for example in whole}
    for example in (*data.train, *data.eval):
        assert example.first_length == by_source[example.source].first_length


def batcher(data: PreparedData, *, packed: bool) -> Batcher:
    return Batcher(
        data.train, packed=packed, multiple_of=8, pad_token_id=0, index_labels=True, device=torch.device("cpu"),
        rows_multiple_of=1,
    )  # fmt: skip


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_has_room_for_both_sequences(of_pairs, packing):
    options = {"max_length": 90, "packing": packing}
    data = of_pairs(pairs(40), **options)
    recipe = Recipe(
        model={"model_name_or_path": "x"}, data={"datasets": [{"path": "x"}], **options}, checkpoint={"output_dir": "x"}
    )
    rows = epoch_rows(BatchLayoutOptions.of(recipe), data, multiple_of=1, padding_free=False)
    assert (rows.length, rows.documents) == (180, 2)
    longest = summarize_data(data).longest
    assert longest == data.train.document_lengths.max() < data.train.lengths.max()
    if packing:
        packs = pack(data.train.lengths, rows.length)
        assert (rows.count, rows.longest_row(longest)) == (len(packs), 180)
        assert sorted(np.concatenate(list(packs)).tolist()) == list(range(40))
    else:
        assert (rows.count, rows.longest_row(longest)) == (40, 2 * longest)


def test_a_packed_batch_has_chosen_and_rejected_documents_in_turn(of_pairs):
    data = of_pairs(pairs())
    one, rows = batcher(data, packed=True), [np.array([3, 7]), np.array([1])]
    batch = one(rows)
    expected = [document for index in (3, 7, 1) for document in data.train[index].documents()]
    assert batch["document_lengths"][:6] == tuple(len(document.input_ids) for document in expected)
    assert batch["input_ids"].shape == (1, one.padded_tokens(rows))
    ids = np.concatenate([document.input_ids for document in expected])
    labels = np.concatenate([document.labels for document in expected])
    assert np.array_equal(batch["input_ids"][0, : len(ids)].numpy(), ids)
    assert np.array_equal(batch["labels"][0, : len(ids)].numpy(), labels)
    predicting = np.flatnonzero(labels != IGNORE_INDEX) - 1  # the row before each trained label
    assert np.array_equal(batch["labelled_rows"].numpy(), predicting)


def test_a_padded_batch_has_chosen_and_rejected_rows_in_turn(of_pairs):
    data = of_pairs(pairs())
    one, rows = batcher(data, packed=False), [np.array([3]), np.array([7])]
    batch = one(rows)
    assert batch["input_ids"].shape[0] == 4 and batch["input_ids"].numel() == one.padded_tokens(rows)
    expected = [document for index in (3, 7) for document in data.train[index].documents()]
    for row, document in enumerate(expected):
        length = len(document.input_ids)
        assert np.array_equal(batch["input_ids"][row, :length].numpy(), document.input_ids)
        assert np.array_equal(batch["labels"][row, :length].numpy(), document.labels)
        assert bool((batch["labels"][row, length:] == IGNORE_INDEX).all())
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:].reshape(-1)
    assert torch.equal(batch["labelled_rows"], torch.nonzero(labels != IGNORE_INDEX)[:, 0])


def test_a_rank_without_rows_gets_an_untrained_pair(of_pairs):
    for packed in (True, False):
        batch = batcher(of_pairs(pairs()), packed=packed)([])
        assert bool((batch["labels"] == IGNORE_INDEX).all()) and batch["input_ids"].numel() > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"streaming": True}, "data.streaming: preference pairs and answers with a label cannot be streamed"),
        ({"train_on": "all"}, "data.train_on: all is not for preferences"),
    ],
)
def test_settings_that_preferences_do_not_have_are_refused(of_pairs, options, says):
    with pytest.raises(UserError, match=says):
        of_pairs(pairs(), **options)


def test_the_bundled_pairs_are_answers_and_their_words_in_another_order(quickstart, of_pairs, stories):
    rows, records = (
        [json.loads(line) for line in (quickstart / name).read_text().splitlines()]
        for name in ("preferences.jsonl", "dolly_short.jsonl")
    )
    answers = {record["instruction"]: record["output"] for record in records}
    data = of_pairs(quickstart / "preferences.jsonl", max_length=256)
    assert (len(data.train), data.report.dropped) == (len(rows), {}) == (320, {})
    for row, example in zip(rows, data.train, strict=True):
        words = answers[row["prompt"].removesuffix("\n")].split()
        assert row["chosen"] == " ".join(words) != row["rejected"]
        assert sorted(row["rejected"].split()) == sorted(words)
        # TRL's rule: the completion is what follows the tokens of the prompt
        prompt = stories(row["prompt"]).input_ids
        for name, document in zip(("chosen", "rejected"), example.documents(), strict=True):
            ids = [*stories(row["prompt"] + row[name]).input_ids, stories.eos_token_id]
            assert document.input_ids.tolist() == ids
            assert document.labels.tolist() == [IGNORE_INDEX] * len(prompt) + ids[len(prompt) :]
