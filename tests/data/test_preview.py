"""`ligertune data`: all tokens are shown, trained ones are marked, and the JSON report agrees."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ligertune.cli.render import console as render
from ligertune.cli.render import data_report as render_data
from ligertune.data.preview import LengthStatistics, preview, preview_summary

ROWS = [
    {"instruction": "Say it. 你好", "output": "  é 👩‍👧 [x]\nbye "},
    {"instruction": "Again", "output": "yes"},
    {"instruction": "No", "output": ""},
]


@pytest.fixture
def data(prepared):
    return prepared(ROWS)


@pytest.fixture
def printed(monkeypatch):
    """Call as printed(terminal=False)(prepared, previews) to get the terminal's text."""

    def on(*, terminal: bool):
        def show(*arguments) -> str:
            page = io.StringIO()
            console = Console(file=page, force_terminal=terminal, width=100, soft_wrap=True, color_system="standard")
            monkeypatch.setattr(render.OUTPUT, "console", console)
            data, previews = arguments
            render_data.data_preview(preview_summary(data, data.train, previews), previews)
            return page.getvalue()

        return show

    return on


def test_pieces_joined_are_the_text(data, stories):
    for example, shown in zip(data.train, preview(data.train, stories, 9), strict=True):
        assert "".join(piece.text for piece in shown.pieces) == stories.decode(example.input_ids)
        trained = "".join(text for text, trained in shown.spans if trained)
        alone = stories.decode(example.labels[example.labels != -100])  # without the first of its spaces
        assert trained.lstrip() == alone.lstrip()
        assert (shown.tokens, shown.trained_tokens) == (len(example.labels), (example.labels != -100).sum())
    assert len(preview(data.train, stories, 1)) == 1


def test_plain_text_marks_trained_spans(data, stories, printed):
    page = printed(terminal=False)(data, preview(data.train, stories, 2))
    assert "### Response:\n[[  é 👩‍👧 [x]\nbye </s>]]" in page and "[[yes</s>]]" in page
    assert "2 of 3 rows" in page and "1 empty answer" in page and "d.jsonl:3" in page
    assert f"{data.report.trained_share:.1%}" in page and f"longest {data.train.lengths.max()}" in page


def test_a_terminal_gets_colours(data, stories, printed):
    page = printed(terminal=True)(data, preview(data.train, stories, 1))
    assert "[[" not in page and "\x1b[32m" in page and "\x1b[4;32m" in page


def test_json_agrees(data, stories):
    content = json.loads(json.dumps(preview_summary(data, data.train, preview(data.train, stories, 1))))
    assert content["report"]["dropped"] == {"empty answer": 1}
    assert content["report"]["trained_share"] == data.report.trained_tokens / data.report.tokens
    assert content["lengths"]["max"] == data.train.lengths.max()
    trained = "".join(span["text"] for span in content["examples"][0]["spans"] if span["trained"])
    assert trained == ROWS[0]["output"] + "</s>"


def test_length_statistics(data):
    numbers = LengthStatistics.of(data.train.lengths)
    assert numbers.max == max(data.train.lengths) and numbers.p50 in data.train.lengths
