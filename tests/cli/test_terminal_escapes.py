"""No text of a file, a model or an argument reaches the terminal with its control characters."""

import json
import logging
import shutil
import warnings

import pytest
import yaml
from safetensors.torch import load_file, save_file
from support.command_line import ROOT, run_here

from ligertune.cli.render import console
from ligertune.errors import UserError, printable
from ligertune.recipe.plain_yaml import dump

# clears the screen, a C1 sequence, DEL, a carriage return, right-to-left override and isolate, a lone surrogate
HOSTILE = "a\x1b[2Jb\x9b31mc\x7fd\re\u202ef\u2066g\x00"
OBEYED = [*map(chr, (*range(9), *range(11, 32), *range(0x7F, 0xA0))), *"\u202a\u202b\u202c\u202d\u202e\u2066\u2069"]
MARKUP = "[red]x[/red] [link=file:///etc/passwd]y[/link]"
MODEL = ROOT / "configs" / "quickstart" / "stories260K"
RECIPE = "model: {model_name_or_path: ./model, dtype: float32}\ndata: {datasets: [{path: d.jsonl}]}\n"
RECIPE += "train: {max_steps: 1}\ncheckpoint: {output_dir: out}\n"


def obeyed(text: str) -> list[str]:
    return [character for character in OBEYED if character in text]


@pytest.fixture
def place(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "Hi.", "completion": "Yes."}) + "\n")
    return tmp_path


def test_every_renderer_escapes_and_interprets_no_markup(capsys):
    console.people_on_stderr(False)
    words = f"{HOSTILE} {MARKUP}"
    console.text(words)
    console.note(words)
    console.document(words)
    console.piece(words)
    console.error(UserError(words, hint=words))
    console.table(words, [(words, words)])
    console.columns(words, [words, words], [[words, words]])
    with console.waiting(words):
        pass
    out, err = capsys.readouterr()
    assert not obeyed(out) and not obeyed(err)
    assert out.count("[link=file:///etc/passwd]y[/link]") >= 8 and err.count("[red]x[/red]") == 3
    assert "a\u241b[2Jb\u27e8U+009B\u27e931mc\u2421d\u240de\u27e8U+202E\u27e9f\u27e8U+2066\u27e9g\u2400" in out


def test_text_of_several_lines_keeps_them_and_a_cell_of_a_table_does_not():
    assert printable("a\n\tb\r\n") == "a\n\tb\u240d\n"
    assert printable("a\nError: b", one_line=True) == "a\u240aError: b"
    assert printable("caf\xe9 \u4f60 \U0001f999") == "caf\xe9 \u4f60 \U0001f999"
    printable("\udcff").encode()  # a file name that is not UTF-8


def test_documents_of_json_and_yaml_hold_the_same_values(capsys):
    console.json_report({HOSTILE: [HOSTILE]})
    out = capsys.readouterr().out
    assert json.loads(out) == {HOSTILE: [HOSTILE]} and not obeyed(out)
    words = "right \u202e left \x85 \x9b"
    written = dump({"a": words, "b": {words: "caf\xe9"}})
    assert not obeyed(written) and yaml.safe_load(written) == {"a": words, "b": {words: "caf\xe9"}}


def test_logs_warnings_and_tracebacks_of_libraries_are_escaped(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory = logging.getLogRecordFactory()
    console.escape_libraries()
    import sys

    try:
        assert not obeyed(warnings.formatwarning(HOSTILE, UserWarning, "f.py", 1, "x"))
        record = logging.getLogger("transformers").makeRecord("a", 30, "f", 1, "%s", (HOSTILE,), None)
        assert not obeyed(record.getMessage())
        sys.excepthook(ValueError, ValueError(HOSTILE), None)
        found = capsys.readouterr().err
        assert "ValueError: a\u241b[2Jb" in found and not obeyed(found)
    finally:
        logging.setLogRecordFactory(factory)
        sys.excepthook = sys.__excepthook__


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def add_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors[HOSTILE] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def answer_with(folder):
    """Let every answer be escape sequences: each token of the vocabulary is one."""
    values = json.loads((folder / "tokenizer.json").read_text())
    values["decoder"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": "\x1b[2J"}
    (folder / "tokenizer.json").write_text(json.dumps(values))


GENERATE = ("generate", "./model", "Hi.", "--max-new-tokens", 3)
CASES = {
    "a class name": (lambda place: change(place / "model" / "config.json", hidden_act=HOSTILE), GENERATE),
    "a model type": (lambda place: change(place / "model" / "config.json", model_type=HOSTILE), GENERATE),
    "a tensor": (lambda place: add_tensor(place / "model"), GENERATE),
    "a path": (lambda place: None, ("generate", f"./{HOSTILE[:-1]}", "Hi.")),
    "an option": (lambda place: None, ("generate", f"--{HOSTILE[:-1]}")),
    "a command": (lambda place: None, (HOSTILE[:-1],)),
    "a key of a recipe": (lambda place: (place / "r.yaml").write_text(f"{RECIPE}{json.dumps(HOSTILE)}: 1\n"),
                          ("recipe", "check", "r.yaml")),
    "a value of a recipe": (lambda place: (place / "r.yaml").write_text(f"{RECIPE}task: {json.dumps(HOSTILE)}\n"),
                            ("recipe", "check", "r.yaml")),
    "a key of an import": (lambda place: (place / "x.yaml").write_text(
        "base_model: a\ndatasets: [{path: b, type: alpaca}]\nadapter: lora\n"
        f"{json.dumps(HOSTILE)}: 1\nplugins: [{json.dumps(HOSTILE)}]\n"), ("recipe", "import", "x.yaml")),
    "a column": (lambda place: (place / "d.jsonl").write_text(json.dumps({HOSTILE: 1}) + "\n"), ("data", "r.yaml")),
    "a text": (lambda place: (place / "d.jsonl").write_text(
        json.dumps({"prompt": HOSTILE, "completion": HOSTILE, HOSTILE: 1}) + "\n"), ("data", "r.yaml")),
    "a template": (lambda place: (place / "model" / "chat_template.jinja").write_text(
        "{{ raise_exception('" + HOSTILE[:-1] + "') }}"), GENERATE),
    "an answer": (lambda place: answer_with(place / "model"), GENERATE),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_others_write_is_shown_with_signs(case, place):
    prepare, arguments = CASES[case]
    prepare(place)
    done = run_here(*arguments, cwd=place)
    shown = done.out + done.err
    assert not obeyed(shown) and "Traceback" not in shown
    assert "\u241b" in shown or "\\x1b" in shown or "\\u001b" in shown or "\\e" in shown, shown
