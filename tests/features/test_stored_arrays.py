"""Arrays in .npy files: numpy reads what is written row by row, and a wrong file is damage before it is mapped."""

import os
import shutil

import numpy as np
import pytest
from support.quickstart_runs import plan_run
from support.tasks.preference_runs import pairs, settings

from ligertune.features.preference.stored_log_probs import FOLDER, StoredLogProbs
from ligertune.features.stored_arrays import RowWriter, map_array
from ligertune.files.checked_files import DamagedFileError


def test_rows_in_any_order_are_the_array_that_numpy_reads(tmp_path):
    expected = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    places = [np.array([7, 8, 9, 40, 41, 0]), np.array([1]), np.array([], dtype=np.int64)]
    rest = np.setdiff1d(np.arange(50), np.concatenate(places))
    with (tmp_path / "a.npy").open("xb") as file:
        writer = RowWriter(file, np.float32, 50, 3)
        for some in (*places, rest):
            writer.write(some, expected[some].astype(np.float64))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)
    np.testing.assert_array_equal(map_array(tmp_path / "a.npy", np.float32, (50, 3)), expected)
    for dtype, shape in ((np.int32, (50, 3)), (np.float32, (3, 50)), (np.float32, (150,)), (np.float32, (50, 4))):
        with pytest.raises(DamagedFileError):
            map_array(tmp_path / "a.npy", dtype, shape)


def claim(path) -> None:
    """Write a header that claims 10^15 rows."""
    line = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000, 2)}".ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line)


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 4),
    "10^15 rows": claim,
    "objects": lambda path: np.save(path, np.array([[{}, {}]], dtype=object)),
    "another width": lambda path: np.save(path, np.zeros((32, 1), np.float32)),
    "float64": lambda path: np.save(path, np.zeros((32, 2))),
    "not finite": lambda path: np.save(path, np.full((32, 2), np.nan, np.float32)),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "missing": os.unlink,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return plan_run(folder, **settings(folder, pairs(40)), **{"data.datasets.0.max_samples": 40})


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_reference_log_probabilities_are_computed_again(damage, job, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    shutil.rmtree(job.plan.output_dir / FOLDER, ignore_errors=True)
    stored, right = StoredLogProbs(job.plan, job.data.train), np.ones((len(job.data.train), 2), np.float32)
    own, shared = job.plan.output_dir / FOLDER / stored.name, tmp_path / "cache" / "data" / stored.name
    stored.save(right)
    DAMAGE[damage](own)
    np.testing.assert_array_equal(stored.load(), right)  # of the data cache
    DAMAGE[damage](shared)
    assert stored.load() is None
