"""scripts/changed_tests.py finds the tests of a change."""

import pytest
from command_line import ROOT
from script_modules import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("changed_tests.py")


@pytest.fixture
def tree(tmp_path):
    """A small repository: files with their content."""
    files = {
        "ligertune/data/batching/collate.py": "",
        "ligertune/run.py": "",
        "kernels/ligertune_kernels/ops/norms/rms_norm.py": "",
        "scripts/bench_it": "",
        "tests/conftest.py": "",
        "tests/architecture/test_layers.py": "",
        "tests/support/batches.py": "from ligertune.data.batching import collate\n",
        "tests/data/test_cache.py": "",
        "tests/data/batching/test_order.py": "",
        "tests/training/conftest.py": "from ligertune.run import run\n",
        "tests/training/test_loop.py": "def test():\n    import batches\n",
        "tests/kernels/ops/norms/test_rms_norm.py": "",
        "tests/test_scripts.py": "PATH = 'scripts/bench_it'\n",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("ligertune/data/batching/collate.py", ["tests/data/batching/test_order.py", "tests/training/test_loop.py"]),
        ("ligertune/run.py", ["tests/test_scripts.py", "tests/training/test_loop.py"]),
        ("kernels/ligertune_kernels/ops/norms/rms_norm.py", ["tests/kernels/ops/norms/test_rms_norm.py"]),
        ("tests/support/batches.py", ["tests/training/test_loop.py"]),
        ("tests/data/test_cache.py", ["tests/data/test_cache.py"]),
        ("tests/data/test_deleted.py", []),
        ("scripts/bench_it", ["tests/test_scripts.py"]),
        ("pyproject.toml", None),
    ],
)
def test_the_tests_of_a_changed_file(changed, expected, script, tree):
    found = script.tests_of([changed], tree)
    assert found == (["tests"] if expected is None else ["tests/architecture", *expected])


def test_it_reads_this_repository(script):
    found = script.tests_of(["ligertune/data/batching/collate.py"])
    assert 5 < len(found) < 60 and all((ROOT / name).exists() for name in found)
