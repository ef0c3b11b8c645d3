"""`importing` switches garbage collection off during imports, and freezes what they create."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from ligertune.progress import importing


def test_imported_objects_are_excluded_from_later_collections():
    code = """
        import gc
        from ligertune.progress import importing
        with importing():
            assert not gc.isenabled()
            import unittest.mock
        assert gc.isenabled() and gc.get_freeze_count() > 1000
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_nothing_is_frozen_without_new_imports():
    """In the middle of a run, freezing would keep garbage."""
    frozen = gc.get_freeze_count()
    with importing():
        import textwrap  # noqa: F401
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_failed_import_switches_collection_on_again():
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
