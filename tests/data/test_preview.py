"""`ligertune data`: trained tokens are marked, the JSON report agrees, the HTML page is escaped; statistics."""

import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console
from support.data.row_files import write_rows

from ligertune.cli.render import console as render
from ligertune.cli.render import data_report as render_data
from ligertune.cli.render.data_report import BAR, data_page, histogram_rows, visible_text
from ligertune.data.batching.packing import pack
from ligertune.data.prepare import prepare
from ligertune.data.preview import length_statistics, preview, preview_summary
from ligertune.data.statistics import data_statistics
from ligertune.errors import UserError
from ligertune.features.scores.recipe import ClassificationSpec
from ligertune.planning.batch_layout import StatisticsOptions
from ligertune.planning.options import DataOptions, DatasetOptions
from ligertune.planning.preflight import check_report_path
from ligertune.recipe.schema import Recipe

SAID = (("Say it. 你好", "  é 👩‍👧 [x]\nbye "), ("Again", "yes"), ("No", ""))
ROWS = [{"instruction": question, "output": answer} for question, answer in SAID]


@pytest.fixture
def data(prepared):
    return prepared(ROWS)


@pytest.fixture
def printed(monkeypatch):
    """Call as printed(prepared, previews, terminal=False) to get the terminal's text."""

    def show(data, previews, *, terminal: bool) -> str:
        page = io.StringIO()
        console = Console(file=page, force_terminal=terminal, width=100, soft_wrap=True, color_system="standard")
        monkeypatch.setattr(render.OUTPUT, "console", console)
        render_data.data_preview(summary(data, previews), previews)
        return page.getvalue()

    return show


def test_pieces_joined_are_the_text(data, stories):
    for example, shown in zip(data.train, preview(data.train, stories, 9), strict=True):
        assert "".join(piece.text for piece in shown.pieces) == stories.decode(example.input_ids)
        trained = "".join(text for text, trained in shown.spans if trained)
        alone = stories.decode(example.labels[example.labels != -100])  # without the first of its spaces
        assert trained.lstrip() == alone.lstrip()
        assert (shown.tokens, shown.trained_tokens) == (len(example.labels), (example.labels != -100).sum())
    assert len(preview(data.train, stories, 1)) == 1


def test_a_row_of_several_documents_gives_several_examples(prepared, stories, printed):
    rows = [{"input_ids": [5, 6, 7, 8, 9, 2], "seq_lengths": [2, 2, 2]}] * 2 + [{"input_ids": [5, 2]}]
    data = prepared(rows)
    page = " ".join(printed(data, preview(data.train, stories, 1), terminal=False).split())
    assert " 7 from 3 rows " in page and "4 of 7 examples end without a special token" in page


def test_plain_text_marks_trained_spans_and_a_terminal_gets_colours(data, stories, printed):
    page = printed(data, preview(data.train, stories, 2), terminal=False)
    assert "### Response:\n[[  é 👩‍👧 [x]\nbye </s>]]" in page and "[[yes</s>]]" in page
    assert "2 of 3 rows" in page and "1 empty answer" in page and "d.jsonl:3" in page
    assert f"{100 * data.report.trained_share:.1f} %" in page and f"longest {data.train.lengths.max()}" in page
    page = printed(data, preview(data.train, stories, 1), terminal=True)
    assert "[[" not in page and "\x1b[32m" in page and "\x1b[4;32m" in page


def test_json_agrees(data, stories):
    content = json.loads(json.dumps(summary(data, preview(data.train, stories, 1))))
    assert content["report"]["dropped"] == {"empty answer": 1}
    assert content["report"]["trained_share"] == data.report.trained_tokens / data.report.tokens
    assert content["lengths"]["max"] == data.train.lengths.max() and content["lengths"]["p50"] in data.train.lengths
    trained = "".join(span["text"] for span in content["examples"][0]["spans"] if span["trained"])
    assert trained == ROWS[0]["output"] + "</s>"


HOSTILE = "<script>alert(1)</script> <img src=http://evil/x> </pre> &amp; \x1b[31m \u202egnp.exe </s>"
HOSTILE_ROWS = [{"instruction": i, "output": o} for i, o in ((HOSTILE, HOSTILE), ("<b>", ""), ("ok", "fine"))]


class Reader(HTMLParser):
    """Parses the page into elements, attributes and text. Unclosed elements are an error."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(document)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def hostile(tmp_path, prepared):
    return prepared(write_rows(tmp_path / "<i>d.jsonl", HOSTILE_ROWS))


def recipe(**train: object) -> Recipe:
    return Recipe(
        model={"model_name_or_path": "m"},
        data={"datasets": [{"path": "d"}], "max_length": 64},
        checkpoint={"output_dir": "o"},
        train={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **train},
    )


def summary(data, previews):
    options = StatisticsOptions.of(recipe(), processes=1)
    statistics = data_statistics(data.train.lengths % 60 + 1, data.train.trained % 7, options)
    return preview_summary(data, data.train, previews, statistics)


def test_data_is_escaped(hostile, stories):
    document = data_page(summary(hostile, preview(hostile.train, stories, 5)), title="Data of <recipe>.yaml")
    read = Reader(document)
    assert {tag for tag, _ in read.elements} & {"script", "img", "iframe", "link", "a"} == set()
    text = "".join(read.words)
    assert text.count("<script>alert(1)</script>") == 2 and "</pre> &amp; " in text
    assert "<i>d.jsonl:2" in text and "Data of <recipe>.yaml" in text
    assert "\x1b" not in document and "\u202e" not in document and "\u241b[31m \u27e8U+202E\u27e9gnp.exe" in text
    # nothing is fetched
    assert not [attribute for _, attrs in read.elements for attribute in attrs if attribute in ("src", "href")]
    policy = next(attrs["content"] for tag, attrs in read.elements if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'") and "url(" not in document and "@import" not in document


def test_trained_pieces_and_control_tokens_are_marked(hostile, stories):
    shown = preview(hostile.train, stories, 2)
    document = data_page(summary(hostile, shown), title="t")
    assert "<i class=s>&lt;s&gt;</i>" in document and "<b class=s>&lt;/s&gt;</b>" in document
    # "</s>" in the row's own text is text: only the end of each example is the control token
    assert document.count("<b class=s>&lt;/s&gt;</b>") == 2
    assert [piece.special for piece in shown[0].pieces].count(True) == 2  # BOS and EOS
    assert "1</td><td class=n>33.33%</td><td>empty answer" in document
    assert document.count("<rect") == len(summary(hostile, shown)["lengths"]["counts"])


PAIRS = [{"prompt": f"Say {n}.\n", "chosen": f"{n} " * (n + 1), "rejected": "no"} for n in range(3)]


def test_both_answers_of_a_pair_are_shown_with_what_is_trained(prepared, stories, printed):
    data = prepared(PAIRS, content="pairs")
    previews = preview(data.train, stories, 2)
    assert [(shown.number, shown.answer) for shown in previews] == [
        (1, "chosen"), (1, "rejected"), (2, "chosen"), (2, "rejected"),
    ]  # fmt: skip
    page = printed(data, previews, terminal=False)
    assert "d.jsonl:2, chosen, " in page and "Say 1.\n[[1 1 </s>]]" in page and "Say 1.\n[[no</s>]]" in page
    found = summary(data, previews)
    answers = found["answers"]
    assert answers["chosen"]["tokens"] + answers["rejected"]["tokens"] == data.report.tokens
    assert answers["chosen"]["trained_tokens"] + answers["rejected"]["trained_tokens"] == data.report.trained_tokens
    assert answers["chosen"]["trained_tokens"] > answers["rejected"]["trained_tokens"]
    assert found["lengths"]["max"] == data.train.document_lengths.max()
    assert "The whole run has only 1 optimizer step." in page
    assert "3 of 3 rows" in page and "Tokens per sequence" in page and "rejected" in data_page(found, title="t")


def test_texts_to_classify_are_shown_with_the_token_that_learns_the_label(stories, printed, tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"text": "A cat.", "label": "b"}, {"text": "A dog.", "label": "a"}])
    options = DataOptions(datasets=[DatasetOptions(path=str(path))])
    data = prepare(options, stories, seed=0, rows="texts", label_options=ClassificationSpec())
    page = printed(data, preview(data.train, stories, 1, labels=data.labels), terminal=False)
    assert "Trained: [[between double brackets]]. The label in each heading is learned there." in page
    assert "d.jsonl:1, b, " in page and "A cat[[.]]" in page


def test_labelled_answers_are_shown_with_their_label(prepared, stories, printed):
    rows = [{"prompt": "p", "completion": f" {n}", "label": n != 1} for n in range(3)]
    data = prepared(rows, content="labelled")
    previews = preview(data.train, stories, 2)
    assert [shown.answer for shown in previews] == ["desirable", "undesirable"]
    counts = {name: part["examples"] for name, part in summary(data, previews)["answers"].items()}
    assert counts == {"desirable": 2, "undesirable": 1}
    assert "d.jsonl:2, undesirable, " in printed(data, previews, terminal=False)


def test_statistics_of_pairs_count_two_rows_of_each():
    """A pair is padded to the longer sequence of its micro-batch in both of its rows."""
    longest, lengths = np.array([10, 60, 20, 30]), np.array([15, 100, 30, 40], dtype=np.int64)
    options = StatisticsOptions.of(recipe(num_train_epochs=2), processes=1)
    found = data_statistics(lengths, lengths // 2, options, longest=longest, documents=2)
    assert found["fill_packed"] == pack(lengths, 128).fill and found["rows"] == 2
    assert found["fill_grouped"] == pytest.approx(185 / (4 * 20 + 4 * 60))
    assert found["fill_to_max_length"] == pytest.approx(185 / (4 * 128))
    assert found["tokens"] == 2 * 185


def test_statistics_of_rows_padding_steps_and_tokens():
    lengths = np.array([10, 60, 20, 30, 40, 50, 5], dtype=np.int64)
    found = data_statistics(lengths, lengths // 2, StatisticsOptions.of(recipe(num_train_epochs=2), processes=2))
    packs = pack(lengths, 64)
    assert (found["rows"], found["fill"], found["rows_per_step"]) == (len(packs), packs.fill, 2 * len(packs))
    assert (found["steps"], found["tokens"], found["trained_tokens"]) == (1, 2 * 215, 2 * int((lengths // 2).sum()))
    assert found["fill_shuffled"] < found["fill_grouped"] == pytest.approx(215 / (2 * 10 + 2 * 30 + 2 * 50 + 60))
    assert found["fill_to_max_length"] == pytest.approx(215 / (7 * 64))
    per_step = found["steps_per_epoch"], found["tokens_per_step"]
    assert per_step == pytest.approx((0.5, 2 * 215)) and found["few_steps"]  # the run has fewer rows than a batch
    found = data_statistics(lengths, lengths, StatisticsOptions.of(recipe(num_train_epochs=99), processes=2))
    assert (found["rows_per_step"], found["few_steps"]) == (12, False)
    assert found["tokens_per_step"] == pytest.approx(12 * 215 / len(packs))
    padded = recipe().model_copy(update={"data": recipe().data.model_copy(update={"packing": False})})
    alone = data_statistics(lengths, lengths // 2, StatisticsOptions.of(padded, processes=1))
    assert (alone["rows"], alone["packed"], alone["fill"]) == (7, False, alone["fill_grouped"])
    joined = padded.model_copy(update={"data": padded.data.model_copy(update={"padding_free": True})})
    padding_free = data_statistics(lengths, lengths // 2, StatisticsOptions.of(joined, processes=1))
    assert (alone["padding_free"], padding_free["padding_free"], padding_free["fill"]) == (False, True, 1.0)
    found = data_statistics(lengths, lengths, StatisticsOptions.of(recipe(max_steps=4), processes=1))
    assert found["tokens"] == round(215 * 4 * 6 / len(packs))
    assert (found["rows_per_step"], found["few_steps"]) == (6, False)  # max_steps was chosen


def test_statistics_of_the_lengths_1_to_101():
    found = length_statistics(np.arange(1, 102))
    assert found["edges"] == [*range(1, 102, 6)] and found["counts"] == [6] * 16 + [5]
    assert [found[name] for name in ("mean", "p50", "p90", "p95", "p99", "max")] == [51.0, 51, 91, 96, 100, 101]


def test_the_histogram_begins_at_the_shortest_length_and_merges_empty_bins():
    rows = histogram_rows(length_statistics(np.array([218] * 5 + [900])))
    assert rows == [("218 to 252", f"{'█' * BAR} 5"), ("253 to 882", "0"), ("883 to 900", f"{'█' * (BAR // 5)} 1")]
    assert histogram_rows(length_statistics(np.array([7, 7]))) == [("7", f"{'█' * BAR} 2")]


def test_invisible_text_is_made_visible():
    assert visible_text("a\tb\nc é 你") == "a\tb\nc é 你"
    assert visible_text("\x00\x1b\x7f\u200b\u2066\x9b") == "␀␛␡⟨U+200B⟩⟨U+2066⟩⟨U+009B⟩"
    assert visible_text("👩‍👧") == "👩‍👧"  # the joiner of emoji stays


def test_an_unwritable_page_is_refused_before_the_data_is_read(tmp_path):
    for name in ("", "nowhere/report.html"):
        with pytest.raises(UserError, match=r"--out: .*(is a folder|does not exist)"):
            check_report_path(tmp_path / name)
