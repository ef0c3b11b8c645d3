"""`ligertune compare` without a recipe, on the bundled model."""

from __future__ import annotations

import json


def test_both_sides_run_and_their_losses_agree(ligertune):
    done = ligertune("compare", "--steps", "4", "--repeats", "1", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [side["name"] for side in result["sides"]] == ["with", "without"]
    assert all(side["tokens_per_second"] > 0 and side["peak_memory"] for side in result["sides"])
    assert result["parity"]["same"]
    assert result["parity"]["worst"] > 0  # two computations, not one twice
    assert "Loss curves: the same" in done.err


def test_one_side_alone(ligertune):
    done = ligertune("compare", "--without-liger", "--steps", "2", "--repeats", "1", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [side["name"] for side in result["sides"]] == ["without"]
    assert result["parity"] is None
