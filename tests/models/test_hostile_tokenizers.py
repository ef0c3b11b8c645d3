"""Tokenizers from anyone: replacements that fill the memory and expressions that do not end are refused."""

import base64
import json
import shutil
import struct

import pytest
from support.command_line import run_here
from support.models.hostile_folders import RECIPE, refused

from ligertune.data.templates.tokenizer_limits import check_tokenizer_file
from ligertune.errors import UserError
from ligertune.files.model_files import RECIPE_TOKENIZER


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "normalizers": list(steps)}


def split(expression: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def precompiled(longest: int) -> dict:
    table = struct.pack("<I", 4) + b"\0\0\0\0" + b"a" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def change(place, part: str, value: object) -> None:
    path = place / "model" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: value}))


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
A = {"Sequence": {"id": "A", "type_id": 0}}
EXPANDING = {
    "nested replacements": ("normalizer", sequence(*[replace({"String": "a"}, "a" * 1000)] * 4)),
    "one expression of nothing": ("normalizer", replace({"Regex": ""}, "b" * 1000)),
    "a long replacement": ("normalizer", replace({"String": "\xe9"}, "x" * 10**6)),
    "in sequences of sequences": ("normalizer", sequence(sequence(replace({"String": "a"}, "a" * 100)),
                                                         sequence(replace({"String": "a"}, "a" * 100)))),
    "many steps": ("normalizer", sequence(*[{"type": "Lowercase"}] * 101)),
    "a long beginning": ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}),
    "a table of long texts": ("normalizer", precompiled(10**5)),
    "copies of the text": ("post_processor", {**TEMPLATE, "single": [A] * 900}),
    "answers that grow": ("decoder", {"type": "Sequence", "decoders": [replace({"String": "a"}, "a" * 1000)] * 4}),
    "nothing of a replacement": ("normalizer", {"type": "Replace"}),
}  # fmt: skip
ENDLESS = {
    "normalizer": replace({"Regex": r"(\w+\s?)+#"}, "x"),
    "pre_tokenizer": split(r"(?:a|aa|a?)+!"),
    "a letter of its own": split(r"(z+z+)+y"),
}


@pytest.fixture
def place(tmp_path, quickstart):
    shutil.copytree(quickstart / "stories260K", tmp_path / "model")
    (tmp_path / "r.yaml").write_text(RECIPE)
    shutil.copy(quickstart / "dolly_short.jsonl", tmp_path / "d.jsonl")
    return tmp_path


@pytest.mark.parametrize("case", EXPANDING)
def test_a_tokenizer_that_expands_texts_is_refused_before_it_is_loaded(case, place):
    change(place, *EXPANDING[case])
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        check_tokenizer_file(place / "model" / "tokenizer.json", RECIPE_TOKENIZER)


@pytest.mark.parametrize("command", ["train", "generate"])
def test_four_replacements_of_replacements_are_one_sentence(command, place):
    change(place, *EXPANDING["nested replacements"])
    assert "normalizer makes a text more than 256 times as long" in refused(place, command)


@pytest.mark.parametrize("case", ENDLESS)
def test_an_expression_that_does_not_end_is_one_sentence(case, place):
    change(place, case if case in ("normalizer", "pre_tokenizer") else "pre_tokenizer", ENDLESS[case])
    assert "the expression" in refused(place, "generate")


def test_an_unknown_token_that_is_unknown_itself_is_one_sentence(place):
    """transformers looks up the id of an unknown token as that of unk_token."""
    path = place / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unk_token": ""}))
    assert "unk_token is '', which is not in its vocabulary" in refused(place, "generate")


def test_a_panic_on_a_text_of_the_data_is_one_sentence(place):
    """On each process that prepares data, too. The expression fails where no probe of letters reaches."""
    change(place, "normalizer", replace({"Regex": rb"(\u0e01+\u0e01+)+#".decode("unicode_escape")}, "x"))
    row = {"prompt": "Hi.", "completion": "\u0e05" * 500 + "!#"}
    (place / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(300)))
    for processes in (1, 2):
        done = run_here("data", "r.yaml", "--set", f"data.num_proc={processes}", cwd=place)
        assert done.code == 2 and "Traceback" not in done.err and done.err.count("Error: ") == 1, done.err


@pytest.mark.parametrize("expression", [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}|\s+",
    r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
], ids=["two digits", "o200k", "bloom"])  # fmt: skip
def test_published_expressions_pass(expression, place):
    change(place, "pre_tokenizer", split(expression))
    assert run_here("generate", "./model", "Hi.", "--max-new-tokens", 1, cwd=place).code == 0
