"""Answers on disk: what a kill cuts off is no answer, and nothing finished is lost or doubled."""

import json
import time

import pytest

from ligertune.errors import UserError
from ligertune.features.sample.answer_files import (
    AnswerWriter,
    StoredAnswer,
    check_answer_folder,
    claim_folder,
    read_answers,
)


def an_answer(prompt: int, number: int = 0, text: str = "one\ntwo \ud83d\ude00") -> StoredAnswer:
    return StoredAnswer(prompt, number, text, "stop", 2, (5, 6), (-0.5, -1.25))


def test_answers_are_read_as_they_were_written_by_several_processes(tmp_path):
    for rank in (1, 0):
        writer = AnswerWriter(tmp_path / f"answers-{rank}.jsonl")
        for place in range(rank, 6, 2):
            writer.add(an_answer(place, text=f"of {place}"))
        writer.close()
    found = read_answers(tmp_path)
    assert list(found) == [(place, 0) for place in range(6)]
    assert found[3, 0] == an_answer(3, text="of 3")


def test_any_cut_of_the_last_line_is_repaired(tmp_path):
    """A kill may leave any part of a line: the answers before it stay, and the next one begins a new line."""
    path = tmp_path / "answers-0.jsonl"
    writer = AnswerWriter(path)
    writer.add(an_answer(0))
    writer.add(an_answer(1))
    writer.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first, first + 1, first + 30, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert list(read_answers(tmp_path)) == [(0, 0)]
        again = AnswerWriter(path)
        again.add(an_answer(1))
        again.close()
        assert path.read_bytes() == whole


def test_damaged_lines_are_no_answers_and_the_first_of_two_counts(tmp_path):
    good = json.dumps({**vars(an_answer(0, text="first"))})
    wrong = [good.replace('"prompt": 0', '"prompt": "0"'), good[:-3], "\0\0\0", "[]", good.replace("stop", "middle")]
    lines = [*wrong, good, good.replace("first", "second")]
    (tmp_path / "answers-0.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert [answer.text for answer in read_answers(tmp_path).values()] == ["first"]


def test_a_group_is_on_the_disk_without_closing_the_file(tmp_path):
    writer = AnswerWriter(tmp_path / "answers-0.jsonl")
    for place in range(64):
        writer.add(an_answer(place))
    assert len(read_answers(tmp_path)) == 64
    writer.add(an_answer(64))  # the next answer may finish minutes later
    deadline = time.monotonic() + 10
    while len(read_answers(tmp_path)) < 65 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(read_answers(tmp_path)) == 65


def test_a_folder_of_other_settings_or_other_files_is_refused(tmp_path):
    settings = {"temperature": 1.0, "stop": ("a",), "source": "model"}
    claim_folder(tmp_path, settings, "sample.output_dir")
    claim_folder(tmp_path, settings, "sample.output_dir")
    with pytest.raises(UserError, match=r"made with temperature: 1.0, and the recipe says 0.5"):
        claim_folder(tmp_path, {**settings, "temperature": 0.5}, "sample.output_dir")
    check_answer_folder(tmp_path, "sample.output_dir")
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"holds model.safetensors and no answers"):
        check_answer_folder(other, "sample.output_dir")
