"""Start-up phases, and imports without garbage collection."""

import ast
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import pytest
from support.command_line import environment

from ligertune.progress import UNUSED, Phases, importing


def python(code: str, *arguments: str) -> str:
    """Run code in a new process and return its output."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout


def said_by(said: list[str]) -> Callable[[str, float], None]:
    """Append each phase as a line of a pipe shows it."""
    return lambda name, seconds: said.append(f"{name} ... {seconds:.0f} s" if seconds else f"{name} ...")


def test_a_long_phase_is_repeated_until_the_next_one_begins():
    said = []
    with Phases(said_by(said), first="planning", every=0.2) as phases:
        time.sleep(0.5)
        phases.begin("loading the model")
        time.sleep(0.3)
    heard, second = len(said), said.index("loading the model ...")
    assert second >= 1 and heard >= second + 2, said
    assert set(said[:second]) <= {f"planning ... {n} s" for n in range(4)}
    assert set(said[second + 1 :]) <= {f"loading the model ... {n} s" for n in range(4)}
    time.sleep(0.5)
    assert len(said) == heard, "phases are printed after the last one ended"
    assert list(phases.seconds) == ["planning", "loading the model"]
    assert phases.seconds["planning"] >= 0.5


def test_a_phase_that_begins_again_counts_both_times():
    phases = Phases(begun=time.perf_counter() - 7)
    phases.begin("loading")
    phases.begin("planning")
    phases.end()
    assert list(phases.seconds) == ["planning", "loading"] and 7 <= phases.seconds["planning"] < 8


def test_another_process_continues_the_phases():
    said, now = [], time.perf_counter()
    with Phases(said_by(said), first="planning", begun=now - 7, every=0.1) as phases:
        phases.begin("starting")
        passed = time.perf_counter() - now
        time.sleep(0.3)
        handed_on = str(phases.handed_on())
        heard = len(said)
        time.sleep(0.3)
        assert len(said) == heard, "both processes print"
    code = (
        "import ast, sys; from ligertune.progress import taken_over\n"
        "p = taken_over(ast.literal_eval(sys.argv[1]), None); p.begin('loading'); p.end(); print(p.seconds)"
    )
    seconds = ast.literal_eval(python(code, handed_on))
    assert list(seconds) == ["planning", "starting", "loading"]
    assert 7 <= seconds["planning"] <= 7 + passed + 1e-3 and seconds["starting"] >= 0.6


def test_imported_objects_are_excluded_from_garbage_collection():
    python(
        "import gc; from ligertune.progress import importing\n"
        "with importing():\n"
        "    assert not gc.isenabled()\n"
        "    import unittest.mock\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 1000"
    )


def test_nothing_is_frozen_without_a_new_import():
    """In the middle of a run, freezing would keep objects that are to be freed."""
    gc.unfreeze()  # frozen objects can still be freed, which would change their number meanwhile
    try:
        with importing():
            import textwrap  # noqa: F401
        assert gc.isenabled() and gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as earlier imports have left it


def test_garbage_collection_is_on_after_a_failed_import():
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


def test_packages_that_no_command_uses_are_absent_from_imports_alone(monkeypatch, tmp_path):
    (tmp_path / "sklearn.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for package in UNUSED:
        monkeypatch.delitem(sys.modules, package, raising=False)
    for _ in range(2):
        with importing():
            with importing():
                assert find_spec("sklearn") is None
            with pytest.raises(ModuleNotFoundError):
                import sklearn  # noqa: F401
        assert find_spec("sklearn") is not None and not set(UNUSED) & set(sys.modules)
    loaded = ModuleType("sklearn")
    monkeypatch.setitem(sys.modules, "sklearn", loaded)
    with importing():  # what is loaded stays
        assert sys.modules["sklearn"] is loaded
    assert sys.modules["sklearn"] is loaded


@pytest.mark.parametrize("wanted", [True, False])
def test_the_hash_of_triton_is_known_after_imports(wanted):
    """The first launch of a kernel would wait for it. No thread may be left, because data preparation forks."""
    pytest.importorskip("triton")
    said = python(
        "import sys, threading; from ligertune.progress import hashing_triton\n"
        f"with hashing_triton({wanted}):\n"
        "    known = 'triton' in sys.modules\n"
        "cache = sys.modules.get('triton.runtime.cache')\n"
        "print(known, cache and cache.triton_key.cache_info().currsize, threading.active_count())"
    )
    assert said.split() == (["True", "1", "1"] if wanted else ["False", "None", "1"])
