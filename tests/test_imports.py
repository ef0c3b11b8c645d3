"""Garbage is not looked for while something is imported, and before and after as ever."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from ligertune.progress import importing


def test_what_is_imported_is_never_looked_through_again():
    code = """
        import gc
        from ligertune.progress import importing
        with importing():
            assert not gc.isenabled()
            import unittest.mock
        assert gc.isenabled() and gc.get_freeze_count() > 1000
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_nothing_is_frozen_where_nothing_new_is_imported():
    """In the middle of a run, that would keep what is to be freed."""
    frozen = gc.get_freeze_count()
    with importing():
        import textwrap  # noqa: F401
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_module_that_is_missing_leaves_all_as_it_was():
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
