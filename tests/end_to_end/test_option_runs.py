"""Options of loss, data, positions and adapters in whole runs: kernels, padding and ranks do not change the losses."""

from pathlib import Path

import pytest
from support.option_runs import OPTIONS, STRATEGIES, compared, ranks_differ
from support.quickstart_runs import train_ranks

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("options")


@pytest.mark.parametrize("option", OPTIONS)
def test_losses_do_not_depend_on_kernels_and_padding(option, folder):
    for what, difference, allowed in compared("kernels", option, folder):
        assert difference <= allowed, what


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", OPTIONS)
def test_two_ranks_have_the_losses_of_one(option, strategy, folder):
    difference, allowed = ranks_differ(option, strategy, folder, lambda run, changes: train_ranks(2, run, **changes))
    assert difference <= allowed


def test_kept_ranks_train_one_run_after_another(folder):
    """On GPUs they are what `train_ranks` takes."""
    for what, difference, allowed in compared("ranks", "dft", folder / "kept"):
        assert difference <= allowed, what
