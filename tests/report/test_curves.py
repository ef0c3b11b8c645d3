"""curves.png is drawn from what metrics.jsonl holds."""

import json

import pytest

from ligertune.files.plots import draw_curves

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("missing", ["tokens_per_second", "learning_rate"])
def test_a_line_that_lacks_a_number_is_left_out_of_that_curve(missing, tmp_path):
    whole = {"step": 1, "loss": 2.5, "learning_rate": 1e-3, "tokens_per_second": 100.0}
    damaged = {name: value for name, value in {**whole, "step": 2}.items() if name != missing}
    for lines in ([whole, damaged], [damaged]):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        drawn = draw_curves(tmp_path, title="a run", loss_unit="nats")
        assert drawn.stat().st_size > 10_000
