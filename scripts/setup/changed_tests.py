"""Print the test files of what a change touches, one per line; "tests" if that is everything.

    scripts/setup/changed_tests.py [--since REF]

A change is the difference from the merge base of HEAD and REF (default: origin/main or main), committed or not.
Its tests:
- a test file: itself; a conftest.py: the tests of its folder; a file of tests/support: the tests that import it;
- a module: the tests in the folder that mirrors its package, and all tests that import the module by name;
- any other file (a script, README.md, a Dockerfile): the tests that contain its name;
- pyproject.toml and tests/conftest.py: everything.
The checks of tests/architecture always belong to them. Tests that reach a module only through other modules do not:
run the whole suite before a release.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# package folder -> folder of its tests
PACKAGES = {"ligertune": "", "kernels/ligertune_kernels": "kernels", "kernels/hub/torch-ext": "kernels/hub"}
EVERYTHING = ("pyproject.toml", "tests/conftest.py")


def changed_files(since: str | None) -> list[str]:
    """Return the changed and untracked files, as paths from the root."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.split()

    known = [since] if since else ["origin/main", "main"]
    base = next((found[0] for ref in known if (found := git("merge-base", "HEAD", ref))), "HEAD")
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def imported_modules(path: Path) -> set[str]:
    """Return the names of the modules that a file may import: for `from a import b` both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


class TestFiles:
    """The test files, with what they import and contain."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        files = sorted((root / "tests").rglob("*.py"))
        self._tests = [path for path in files if path.stem.startswith("test_")]
        self._imports = {path: imported_modules(path) for path in files}
        self._text = {path: path.read_text(encoding="utf-8") for path in self._tests}

    def of(self, changed: str) -> set[Path]:
        """Return the test files of one changed file."""
        path = self._root / changed
        if changed.startswith("tests/"):
            return self._of_test_code(path)
        for package, tests in PACKAGES.items():
            if changed.startswith(f"{package}/") and path.suffix == ".py":
                inside = Path(changed).relative_to(package)
                module = ".".join((Path(package).name, *inside.with_suffix("").parts)).removesuffix(".__init__")
                return self._beside(self._mirror(inside.parent, tests)) | self._that_import(module)
        return {test for test in self._tests if path.name in self._text[test]}

    def _of_test_code(self, path: Path) -> set[Path]:
        if path.name == "conftest.py":
            return {test for test in self._tests if path.parent in test.parents}
        found = {path} if path in self._tests else set()
        return found | self._that_import(self._module(path))

    def _module(self, path: Path) -> str:
        """Return the name by which tests import a file of tests: a test file by its own, others from tests/."""
        if path.stem.startswith("test_"):
            return path.stem
        return ".".join(path.relative_to(self._root / "tests").with_suffix("").parts).removesuffix(".__init__")

    def _mirror(self, package: Path, tests: str) -> Path:
        """Return the folder of tests that mirrors a package, or the nearest one above it."""
        folder = self._root / "tests" / tests / package
        while not folder.is_dir():
            folder = folder.parent
        return folder

    def _beside(self, folder: Path) -> set[Path]:
        return {test for test in self._tests if test.parent == folder}

    def _that_import(self, module: str) -> set[Path]:
        """Return the tests that import a module, or a file of tests/support or a conftest.py that imports it."""
        found: set[Path] = set()
        for path, imports in self._imports.items():
            if module not in imports:
                continue
            if path.stem.startswith("test_"):
                found.add(path)
            elif self._module(path) != module:
                found |= self._of_test_code(path)
        return found


def tests_of(changed: list[str], root: Path = ROOT) -> list[str]:
    """Return the paths of the tests to run, from the root."""
    if any(name in EVERYTHING for name in changed):
        return ["tests"]
    files = TestFiles(root)
    found = {test for name in changed for test in files.of(name)}
    return [
        "tests/architecture",
        *sorted(str(test.relative_to(root)) for test in found if "architecture" not in test.parts),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="REF", help="branch or commit to compare with")
    print("\n".join(tests_of(changed_files(parser.parse_args().since))))
