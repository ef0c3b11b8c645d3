"""prepare: examples, splits, weights, reports and errors; Examples as a sequence; the same in worker processes."""

import os
import pickle
import signal
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from support.data.row_files import write_rows

from ligertune.data.dataset_report import remedy
from ligertune.data.examples import Example, Examples, Preparation
from ligertune.data.prepare import mix_datasets, prepare
from ligertune.data.row_pipeline import ROWS_PER_CHUNK, RowCounts, RowPipeline, build_blocks, count_processes
from ligertune.data.rows.sources import Record, RecordStream
from ligertune.data.statistics import summarize_data
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions


def alpaca(*outputs: str) -> list[dict]:
    return [{"instruction": f"Say {number}.", "output": output} for number, output in enumerate(outputs)]


@pytest.fixture
def hundred(tmp_path) -> Path:
    return write_rows(tmp_path / "hundred.jsonl", alpaca(*(f"{number} " * (number + 1) for number in range(100))))


def test_examples_are_what_the_tokenizer_gives(tmp_path, prepared, stories):
    example = prepared(alpaca("Zero."), prompt_template="alpaca").train[0]
    text = stories.decode(example.input_ids, skip_special_tokens=True)
    assert text.strip().startswith("Below is") and text.endswith("### Response:\nZero.")
    trained = example.labels != -100
    assert stories.decode(example.labels[trained]) == "Zero.</s>"
    assert np.array_equal(example.labels[trained], example.input_ids[trained])  # not shifted
    assert example.input_ids.dtype == example.labels.dtype == np.int32
    assert example.source == f"{tmp_path / 'd.jsonl'}:1"


def sources(examples: Examples) -> list[str]:
    return [example.source for example in examples]


def test_val_split_is_a_seeded_draw(hundred, prepared):
    def split(seed):
        data = prepared(hundred, seed=seed, val_split=0.097)
        return sources(data.train), sources(data.eval), data

    train, held_out, data = split(7)
    assert (len(train), len(held_out)) == (90, 10) and set(train).isdisjoint(held_out)
    assert split(7)[0] == train != split(8)[0]
    lines = [int(source.rpartition(":")[2]) for source in train]
    assert lines == sorted(lines)
    assert (data.report.rows_read, data.report.examples, data.report.held_out) == (100, 90, 10)
    assert data.report.tokens == int(data.train.lengths.sum()) and data.eval_report is None
    small = prepared(alpaca("a", "b"), val_split=0.01)
    assert (len(small.train), len(small.eval)) == (1, 1)
    with pytest.raises(UserError, match=r"data\.val_split: 0.9 of 2 examples leaves none"):
        prepared(alpaca("a", "b"), val_split=0.9)


def test_several_data_sets_and_eval_datasets_with_their_own_report(tmp_path, hundred, stories):
    other = write_rows(tmp_path / "other.jsonl", alpaca("a " * 500, ""))
    data = DataOptions(datasets=[DatasetOptions(path=str(hundred))], eval_datasets=[DatasetOptions(path=str(other))])
    ready = prepare(data, stories, seed=0)
    assert (len(ready.train), len(ready.eval)) == (100, 1)
    assert summarize_data(ready).longest == ready.eval.lengths.max() > ready.train.lengths.max()
    assert (ready.eval_report.examples, ready.eval_report.dropped) == (1, {"empty answer": 1})
    assert ready.report.dropped == {}
    # data sets of different formats are concatenated
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chats = write_rows(tmp_path / "c.jsonl", [{"messages": turns}])
    sets = [DatasetOptions(path=str(chats)), DatasetOptions(path=str(hundred), max_samples=5)]
    ready = prepare(DataOptions(datasets=sets), stories, seed=0)
    found = [(part.format, part.template, part.examples) for part in ready.report.sets]
    assert ready.template == "chat, alpaca" and found == [("messages", "chat", 1), ("alpaca", "alpaca", 5)]
    assert ready.train[0].source.endswith("c.jsonl:1") and ready.train[5].source.endswith("hundred.jsonl:5")


def test_fingerprint_depends_on_ids_labels_and_ends(hundred, prepared):
    first = prepared(hundred).train.fingerprint
    assert first == prepared(hundred).train.fingerprint
    changed = [prepared(hundred, dataset={"max_samples": 99}), prepared(hundred, train_on="all")]
    assert len({first, *(data.train.fingerprint for data in changed)}) == 3
    ids = np.arange(4, dtype=np.int32)
    cut = [Examples([Example(ids[:n], ids[:n], ""), Example(ids[n:], ids[n:], "")]) for n in (1, 2)]
    cut += [Examples([Example(ids, ids, "", (image,))]) for image in ("a.png", "b.png")]
    assert len({examples.fingerprint for examples in cut}) == 4


def test_bad_rows_are_dropped_and_counted_with_their_source(tmp_path, prepared):
    report = prepared(alpaca("a", "", "b", " ") + [{"instruction": 3, "output": "c"}]).report
    assert report.dropped == {"empty answer": 2, "not text": 1}
    assert report.first_dropped["empty answer"].startswith(f"{tmp_path}/d.jsonl:2")
    assert (report.rows_read, report.examples) == (5, 2)


@pytest.mark.parametrize(
    ("output", "says"), [("", "empty answer"), ("half \ud83d", r"broken text: U\+D83D")], ids=["empty", "surrogate"]
)
def test_on_bad_row_error_names_the_source(prepared, output, says):
    assert prepared(alpaca("a", output)).report.examples == 1
    with pytest.raises(UserError, match=rf"d\.jsonl:2: {says}"):
        prepared(alpaca("a", output), dataset={"on_bad_row": "error"})
    for policy in ("drop", "error"):  # what is not a row is always an error
        with pytest.raises(UserError, match=r"d\.jsonl:2: expected an object with named columns, found a list"):
            prepared([*alpaca("a"), ["i", "o"]], dataset={"on_bad_row": policy})


@pytest.mark.parametrize(
    ("reason", "columns", "repair"),
    [("equal answers", False, False), ("missing value", True, False), ("empty answer", False, True),
     ("not text", True, True)],
)  # fmt: skip
def test_the_remedy_for_dropped_rows_names_only_what_helps(reason, columns, repair):
    text = remedy({reason: 3}, DataOptions(datasets=[{"path": "rows.jsonl"}]))
    assert "Repair or remove these rows" in text
    assert ("name the columns" in text) == columns and ("on_bad_row: repair" in text) == repair


def test_a_data_set_without_examples_is_an_error(prepared):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": False}]
    for rows, says in (
        (alpaca("", "", ""), r"no row can be used: all 3 are dropped \(3 empty answer\), .*d\.jsonl:1"),
        ([{"messages": turns}] * 2, "0 % of its tokens would be trained: all 2 are dropped"),
        ([], "holds no records"),
    ):
        with pytest.raises(UserError, match=says):
            prepared(rows)


def test_overlength_is_dropped_truncated_or_refused(hundred, prepared):
    lengths = prepared(hundred).train.lengths
    limit = int(np.sort(lengths)[60])
    beyond = int((lengths > limit).sum())
    dropped = prepared(hundred, max_length=limit, dataset={"on_bad_row": "error"})  # they are not bad rows
    assert dropped.report.dropped == {"too long": beyond} and dropped.report.overlength == beyond > 0
    cut = prepared(hundred, max_length=limit, on_overlength="truncate")
    assert (len(cut.train), cut.report.truncated, cut.train.lengths.max()) == (100, beyond, limit)
    assert cut.train[99].labels[-1] != -100
    with pytest.raises(UserError, match=rf"hundred\.jsonl:\d+: \d+ tokens, more than data\.max_length: {limit}"):
        prepared(hundred, max_length=limit, on_overlength="error")
    prompt = int((prepared(hundred).train[0].labels == -100).sum())  # of one digit, the shortest
    cut = prepared(hundred, max_length=prompt + 1, on_overlength="truncate")
    assert set(cut.report.dropped) == {"cut before the answer"}
    assert cut.report.truncated == len(cut.train) == 10  # the prompts of one digit


def test_a_template_without_end_of_turn_is_noted(tmp_path, hundred, prepared):
    source = tmp_path / "endless.jinja"
    source.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    notes = prepared(hundred, prompt_template=str(source)).report.notes
    assert len(notes) == 1 and "100 of 100 examples end without a special token" in notes[0]
    assert (
        prepared(hundred).report.notes
        == prepared(hundred, prompt_template=str(source), train_on="all").report.notes
        == ()
    )


def test_system_prompts_of_most_rows_are_noted(prepared):
    plain = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    own = [{"role": "system", "content": "Be brief."}, *plain]
    for rows, noted in (([own, own, plain], "2 of 3 rows have a system prompt"), ([own, plain, plain], "")):
        notes = " ".join(prepared([{"messages": turns} for turns in rows]).report.notes)
        assert noted in notes if noted else "system prompt" not in notes
    assert "system prompt" not in " ".join(prepared([{"messages": plain}], system_prompt="Be brief.").report.notes)


def test_examples_are_a_sequence(hundred, prepared):
    train = prepared(hundred).train
    assert len(train) == len(list(train)) == 100
    assert np.array_equal(train[-1].input_ids, train[99].input_ids)
    chosen = train.select([5, 2])
    assert [example.source for example in chosen] == [train[5].source, train[2].source]
    assert np.array_equal(chosen[1].labels, train[2].labels)
    with pytest.raises(IndexError):
        train[100]


def test_raw_text_is_split_without_loss(tmp_path, prepared, stories):
    texts = ["Once upon a time. " * 40, "The end.", " "]
    data = prepared([{"text": text} for text in texts], max_length=64)
    bos, eos = stories.bos_token_id, stories.eos_token_id
    whole = [[bos, *stories(text, add_special_tokens=False).input_ids, eos] for text in texts]
    pieces = [example.input_ids.tolist() for example in data.train]
    assert [len(piece) for piece in pieces[:-2]] == [64] * (len(pieces) - 2)
    assert list(chain(*pieces[:-1])) == whole[0] and pieces[-1] == whole[1]
    assert all((e.labels[1:] == e.input_ids[1:]).all() and e.labels[0] == -100 for e in data.train)
    assert data.report.dropped == {"no text": 1} and data.report.overlength == 0
    assert len(prepared([{"text": texts[1]}], max_length=len(whole[1]) - 1).train) == 1  # the last token alone
    (tmp_path / "book.txt").write_text("Once upon a time.\n\nThe end.\n" * 20)
    book = prepared(tmp_path / "book.txt", max_length=100)
    assert book.report.sets[0].format == "text" and book.report.trained_share > 0.98
    assert len(book.train) == -(-int(book.train.lengths.sum()) // 100)


SET_OF = np.repeat([0, 1, 2], [10, 4, 7])


def test_whole_weights_repeat_and_fractions_are_a_seeded_draw():
    assert mix_datasets(SET_OF, [1, 1, 1], seed=3).tolist() == list(range(21))
    seen = Counter(mix_datasets(SET_OF, [2, 0.5, 1.4], seed=0).tolist())
    assert [seen[place] for place in range(10)] == [2] * 10
    assert sorted(seen[place] for place in range(10, 14)) == [0, 0, 1, 1]
    assert Counter(seen[place] for place in range(14, 21)) == {1: 4, 2: 3}
    draws = [tuple(mix_datasets(SET_OF, [1, 0.5, 0.5], seed=seed)) for seed in [*range(10), 0]]
    assert draws[0] == draws[-1] and len(set(draws)) > 1


def test_prepare_mixes_and_notes_it(tmp_path, stories):
    two = [
        write_rows(tmp_path / f"{name}.jsonl", ({"instruction": f"{name}{n}", "output": "o"} for n in range(count)))
        for name, count in (("a", 20), ("b", 10))
    ]
    sets = [DatasetOptions(path=str(path), weight=weight) for path, weight in zip(two, (0.5, 3.0), strict=True)]
    data = prepare(DataOptions(datasets=sets), stories, seed=0)
    files = Counter(Path(source.rpartition(":")[0]).name for source in sources(data.train))
    assert files == {"a.jsonl": 10, "b.jsonl": 30}
    assert data.report.notes == (f"An epoch has 40 examples: 10 of {two[0]} (weight 0.5), 30 of {two[1]} (weight 3).",)
    # held-out examples of a repeated set are not trained
    sets = [DatasetOptions(path=str(path), weight=2.5) for path in two]
    data = prepare(DataOptions(datasets=sets, val_split=0.2), stories, seed=0)
    assert set(sources(data.train)).isdisjoint(sources(data.eval))
    assert (len(data.eval), len(set(sources(data.train))), data.report.held_out) == (6, 24, 6)
    assert set(Counter(sources(data.train)).values()) == {2, 3}


ROWS = 7 * ROWS_PER_CHUNK + 3  # enough for workers, and a last chunk that is not full


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    outputs = ("" if n % 100 == 7 else f"{n} " * (n % 9 + 1) for n in range(ROWS))
    return write_rows(tmp_path_factory.mktemp("many") / "many.jsonl", alpaca(*outputs))


def test_more_processes_give_the_same_examples_and_report(many, prepared):
    alone, three = (prepared(many, num_proc=number, cache=False) for number in (1, 3))
    assert three.train.fingerprint == alone.train.fingerprint and sources(three.train) == sources(alone.train)
    assert three.report == alone.report and three.report.dropped == {"empty answer": 18}
    assert three.report.first_dropped["empty answer"].startswith(f"{many}:8 ")


def test_errors_in_workers_reach_the_user(many, prepared):
    with pytest.raises(UserError, match=r"many\.jsonl:8: empty answer"):
        prepared(many, num_proc=2, cache=False, dataset={"on_bad_row": "error"})
    with pytest.raises(UserError, match="was killed") as caught:
        list(build_blocks(Fatal(), [Record({}, "f:1")] * ROWS, processes=2))
    assert caught.value.exit_code == 1 and "TOKENIZERS_PARALLELISM" not in os.environ


def test_progress_counts_rows(many, stories):
    assert (count_processes("auto"), count_processes(5)) == (min(len(os.sched_getaffinity(0)), 24), 5)
    seen: list[tuple[str, int, float]] = []
    data = DataOptions(datasets=[DatasetOptions(path=str(many))], num_proc=2, cache=False)
    prepare(data, stories, seed=0, progress=lambda *told: seen.append(told))
    assert [done for _, done, _ in seen] == [*range(ROWS_PER_CHUNK, ROWS, ROWS_PER_CHUNK), ROWS, ROWS]
    shares = [share for _, _, share in seen]
    assert shares == sorted(shares) and shares[-1] == 1.0 and {path for path, _, _ in seen} == {str(many)}


class Rows:
    """A RowPipeline that makes no examples."""

    def examples(self, records, counts):
        counts.rows_read += len(records)
        return []


class Fatal(Rows):
    def examples(self, records, counts):
        os.kill(os.getpid(), signal.SIGKILL)


def test_few_chunks_are_read_ahead():
    taken = 0

    def records():
        nonlocal taken
        for taken in range(1, 100 * ROWS_PER_CHUNK + 1):
            yield Record({}, f"f:{taken}")

    done = build_blocks(Rows(), records(), processes=2)
    next(done)
    assert taken <= 6 * ROWS_PER_CHUNK
    assert sum(counts.rows_read for _, counts in done) + ROWS_PER_CHUNK == taken == 100 * ROWS_PER_CHUNK


@pytest.mark.parametrize("template", ["alpaca", "chat"])
def test_a_pickled_pipeline_makes_the_same_examples(many, stories, template):
    spec = DatasetOptions(path=str(many), max_samples=20)
    data = DataOptions(datasets=[spec], prompt_template=template)
    records = list(RecordStream(spec))
    rows = RowPipeline(spec, Preparation(data, stories), records)
    here, there = (path.examples(records, RowCounts()) for path in (rows, pickle.loads(pickle.dumps(rows))))
    assert Examples(there).fingerprint == Examples(here).fingerprint


CALLS = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
)


def test_a_row_that_is_nested_too_deeply_is_dropped(prepared, tmp_path):
    """Python parses these lists; what walks through them afterwards needs more frames for each level."""
    (tmp_path / "calls.jinja").write_text(CALLS)
    rows = []
    for depth in (700, 3):
        deep = "[" * depth + "]" * depth
        call = f'{{"function": {{"name": "f", "arguments": {{"a": {deep}}}}}}}'
        turns = f'{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": "a", "tool_calls": [{call}]}}'
        rows.append(f'{{"messages": [{turns}]}}\n')
    (tmp_path / "deep.jsonl").write_text("".join(rows))
    report = prepared(tmp_path / "deep.jsonl", prompt_template=str(tmp_path / "calls.jinja")).report
    assert report.dropped == {"nested too deeply": 1} and report.examples == 1
    assert report.first_dropped["nested too deeply"].endswith("deep.jsonl:1")
