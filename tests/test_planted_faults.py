"""scripts/plant_faults: its faults fit the code, and it distinguishes caught from missed faults."""

import pytest
from support.script_modules import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("plant_faults")


def test_every_fault_still_fits_the_code(script):
    faults = script.read_faults()
    assert script.stale(faults) == []
    assert len(faults) >= 75


def test_a_snippet_that_does_not_match_once_is_an_error(script):
    fault = script.Fault("a", "b.py", "x = 1", "x = 2", "", ())
    assert fault.planted_in("x = 1\n") == "x = 2\n"
    for source in ("x = 3\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"a: b\.py has the snippet \d times instead of once"):
            fault.planted_in(source)


def test_caught_and_missed_faults_are_distinguished(script, tmp_path):
    (tmp_path / "module.py").write_text("def double(x):\n    y = 2 * x\n    return y\n")
    (tmp_path / "test_module.py").write_text(
        "from module import double\n\ndef test_two():\n    assert double(2) == 4\n"
    )
    script.WARM = ("pytest",)
    planter = script.Planter(tmp_path)
    try:
        for replacement, found in (("y = 3 * x", "FAILED test_module.py::test_two"), ("y = x * x", None)):
            fault = script.Fault("a", "module.py", "y = 2 * x", replacement, "", ("test_module.py",))
            assert planter.caught_by(fault, targeted=True) == found
    finally:
        planter.close()
    assert "2 * x" in (tmp_path / "module.py").read_text()
