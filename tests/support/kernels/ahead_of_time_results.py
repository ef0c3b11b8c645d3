"""Committed results of the ahead-of-time test, which hold as long as the code that determines them is unchanged.

The key of an op is a hash of triton's version and of the code of all files that its kernels and launches depend on,
without comments and docstrings.
"""

import ast
import functools
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import ligertune_kernels
from ligertune_kernels.table import OPS

from support.kernels.pretend_gpu import TARGETS, Compiled

PACKAGE = Path(ligertune_kernels.__file__).parent
HERE = Path(__file__).parent
COMPILING = tuple(HERE / name for name in ("ahead_of_time_cases.py", "pretend_gpu.py"))
RESULTS = HERE.parents[1] / "kernels" / "ahead_of_time.json"
DEFAULTS = {field.name: field.default for field in fields(Compiled)}


@functools.cache
def code_of(path: Path) -> str:
    """Return the file's source without comments, docstrings and blank lines."""
    source = path.read_text(encoding="utf-8")
    # where a module of test support lies does not change what is compiled, so moving one keeps the results
    source = re.sub(r"^from support\.[\w.]*?(\w+) import", r"from \1 import", source, flags=re.MULTILINE)
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, col = token.start
            lines[row - 1] = lines[row - 1][:col]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def _imported_files(path: Path) -> set[Path]:
    imports = [node for node in ast.walk(ast.parse(code_of(path))) if isinstance(node, ast.ImportFrom) and node.module]
    modules = {node.module for node in imports}
    modules |= {f"{node.module}.{alias.name}" for node in imports for alias in node.names}  # of a package
    files = (PACKAGE.parent / f"{module.replace('.', '/')}.py" for module in modules)
    return {file for file in files if file.is_file()}


def files_of(op: str) -> list[Path]:
    """Return the op's file and all files of the package that it imports, directly or not."""
    module = next(row.module for row in OPS if row.name == op)
    found, waiting = set(), {PACKAGE.parent / f"{module.replace('.', '/')}.py"}
    while waiting:
        found |= waiting
        waiting = set().union(*map(_imported_files, waiting)) - found
    return sorted(found)


@functools.cache
def key_of(op: str) -> str:
    """Return the hash of all that determines the op's compiled kernels."""
    code = [version("triton"), *map(code_of, (*COMPILING, *files_of(op)))]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


class CommittedResults:
    """Compiled kernels by op and GPU, as the file has them."""

    def __init__(self, path: Path = RESULTS) -> None:
        self.path = path
        self._rows: dict[str, dict] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def holds(self, op: str) -> bool:
        """Return whether the op's results are those of the current code."""
        return self._rows.get(op, {}).get("key") == key_of(op)

    def get(self, op: str, arch: str) -> list[Compiled] | None:
        """Return the kernels; None where the file has none for the current code."""
        rows = self._rows[op].get(arch) if self.holds(op) else None
        if rows is None:
            return None
        return [Compiled(**{n: tuple(v) if isinstance(v, list) else v for n, v in row.items()}) for row in rows]

    def set(self, op: str, arch: str, kernels: Iterable[Compiled]) -> None:
        """Replace the op's results for one GPU, and discard those of other code."""
        if not self.holds(op):
            self._rows[op] = {"key": key_of(op)}
        self._rows[op][arch] = [
            {name: value for name, value in asdict(kernel).items() if value != DEFAULTS[name]} for kernel in kernels
        ]

    def write(self) -> None:
        """Write the file in the order of the tables, one kernel per line."""
        ops = []
        for op in (row.name for row in OPS if row.name in self._rows):
            rows = self._rows[op]
            lines = {arch: ",\n   ".join(map(json.dumps, rows[arch])) for arch in TARGETS if arch in rows}
            gpus = [f'  "{arch}": [\n   {text}\n  ]' for arch, text in lines.items()]
            ops.append(f' "{op}": {{\n' + ",\n".join([f'  "key": "{rows["key"]}"', *gpus]) + "\n }")
        self.path.write_text("{\n" + ",\n".join(ops) + "\n}\n", encoding="utf-8")
