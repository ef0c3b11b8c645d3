"""scripts/bench context: the tokens of a row, the document that it trains on, and a whole run on a CPU."""

import json
import sys
from argparse import Namespace

import pytest
from support.quickstart_runs import plan_run
from support.script_modules import script_module


@pytest.fixture
def script():
    return script_module("benchmarks.runs.context")


def test_a_row_has_the_tokens_that_memory_host_and_time_have_room_for(script, tmp_path):
    plan = plan_run(tmp_path, **{"method.type": "lora", "data.packing": True}).plan
    options = Namespace(tokens=None, layers=None, plan=False, host_share=0.5, row_seconds=60.0, steps=1)
    of_layer = 4 * 64 * 4  # inputs of 4 of 5 layers wait on the host, 64 float32 values a token
    assert script.chosen_tokens(options, plan, 10_000, 1 << 40) == (9_216, "memory")
    assert script.chosen_tokens(options, plan, 10_000, 2 * 5_000 * of_layer) == (4_096, "host memory")
    slow = Namespace(**{**vars(options), "row_seconds": script.seconds_of(plan, 3_000, 5)})
    assert script.chosen_tokens(slow, plan, 10_240, 1 << 40) == (2_048, "time")
    two = Namespace(**{**vars(options), "layers": 2})
    assert script.chosen_tokens(two, plan, 10_000, 2 * 5_000 * 64 * 4) == (4_096, "host memory")
    assert script.chosen_tokens(Namespace(**{**vars(options), "tokens": 700}), plan, 9, None) == (700, "--tokens")


def test_the_document_holds_the_texts_of_the_corpus(script, tmp_path, corpus):
    texts = script.corpus(corpus)
    assert len(texts) > 1000 and all(len(text) > 30 for text in texts)
    options = Namespace(out=tmp_path, small=False, corpus=corpus)
    text = json.loads(script.write_text(options, 20_000).read_text(encoding="utf-8"))["text"]
    tokenizer = script.Tokenizer.from_file(str(script.tokenizer_of(options) / "tokenizer.json"))
    assert 19_990 < len(tokenizer.encode(text)) <= 19_999  # with its two ends one row, and not a second one


def test_rows_of_several_runs_make_one_page(script, monkeypatch, tmp_path):
    rows = [{"row": "qlora-80", "layers": 32, "tokens": 370_000},
            {"row": "qlora-24", "layers": 2, "tokens": 1_024},
            {"row": "qlora-24", "layers": 2, "tokens": 256_000}]  # fmt: skip
    page = {"page": "context", "title": "T", "intro": "I", "caveats": ["C"], "device": "NVIDIA H100 80GB HBM3",
            "count": 1, "versions": {"torch": "2.11.0"}, "date": "2026-11-26", "commit": "1", "remarks": [],
            "left_out": ["Without a row: lora-80."], "columns": script.COLUMNS}  # fmt: skip
    printed = ["qlora-80: ...", *(json.dumps({**page, "rows": [row], "command": f"run {row['row']}"}) for row in rows)]
    (tmp_path / "out.txt").write_text("\n".join(printed), encoding="utf-8")
    arguments = ["bench", "context", "--from", str(tmp_path / "out.txt"), "--page", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="0"):
        script.main()
    text = (tmp_path / "context_h100_202611.md").read_text(encoding="utf-8")
    assert "| qlora-24 | 256,000 | 2 |\n| qlora-80 | 370,000 | 32 |" in text
    assert "1,024" not in text and "abc" in text and "run qlora-80; run qlora-24" in text
    assert "Without a row: qlora-40, qlora-48, lora-24, lora-40, lora-80, full-80 (not run)." in text


@pytest.mark.parametrize(
    ("changed", "predicted"), [({}, 10.0), ({"steps": 2}, 12.0), ({"at": "step"}, 12.0), ({"method": "full"}, 12.0)]
)
def test_the_peak_of_a_first_step_has_no_optimizer_states(script, changed: dict, predicted: float) -> None:
    """AdamW allocates them at the end of the first step, with `optim_in_backward` before its peak."""
    gib = 1 << 30
    point = {"row": "qlora-24", "method": "qlora", "at": "first layer", "steps": 1, "tokens": 20, "published": 10,
             "predicted": 12 * gib, "measured": 8 * gib, "parts": {"optimizer": 2 * gib}, **changed}  # fmt: skip
    row = script.finished(point)
    assert (row["predicted_gib"], row["later_gib"], row["measured_gib"]) == (predicted, 12.0, 8.0)
    assert (row["error"], row["times"]) == (predicted / 8 - 1, 2.0)


@pytest.mark.slow
def test_it_trains_its_rows_on_a_cpu(script, monkeypatch, tmp_path, capsys):
    arguments = ["--small", "--only", "lora-24,full", "--layers", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", "context", *arguments])
    assert script.main() == 0
    (page,) = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"page": '))
    assert [(row["row"], row["tokens"], row["layers"]) for row in page["rows"]] == [
        ("lora-24", 500, 2),
        ("full-80", 500, 2),
    ]
    assert [len(row["losses"]) for row in page["rows"]] == [1, 2]
    assert all("failed" not in row for row in page["rows"])


@pytest.mark.slow
def test_an_error_of_a_row_is_one_sentence(script, monkeypatch, tmp_path, capsys):
    arguments = ["--small", "--only", "lora-24", "--layers", "9", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", "context", *arguments])
    assert script.main() == 1
    # bitsandbytes may print a warning before
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Error")]
    assert printed[0] == "Error: model.num_hidden_layers: 9, but the model has 3 layers. Write fewer."
