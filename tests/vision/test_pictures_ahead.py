"""Pictures are read by threads before they are asked for, once for each time they were expected."""

from __future__ import annotations

import pytest
import torch

from ligertune.errors import UserError
from ligertune.vision.inputs import ImagePrefetcher


def test_what_was_expected_is_taken_as_often_and_then_let_go(reader_of, pictures):
    reader = reader_of("qwen2_vl")
    ahead = ImagePrefetcher(reader)
    red, blue = str(pictures["red"]), str(pictures["blue"])
    ahead.expect([red, blue, red])
    first, second = ahead.take(red), ahead.take(red)
    assert first is second and red not in ahead._made and blue in ahead._made
    for path in (blue, red):  # expected, and not expected
        assert torch.equal(ahead.take(path)["pixel_values"], reader.pixels(path)["pixel_values"])
    assert not ahead._made


def test_a_picture_that_went_away_is_a_sentence(reader_of, tmp_path):
    ahead = ImagePrefetcher(reader_of("qwen2_vl"))
    ahead.expect([str(tmp_path / "gone.png")])
    with pytest.raises(UserError, match=r"gone\.png: the image could be read when the data was prepared"):
        ahead.take(str(tmp_path / "gone.png"))
