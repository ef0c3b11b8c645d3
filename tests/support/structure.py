"""Numbers of the code's structure, each with its places: how far features spread, density, and who imports whom.

Python's own modules of the two packages are measured, not tests and scripts.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

# feature -> words by which a file outside its folder names it
FEATURES = {
    "medusa": r"medusa",
    "distill": r"(?<!self_)distill",
    "preference": r"preference|\bdpo\b|\bkto\b|\borpo\b|\bsimpo\b",
    "scores": r"classification|reward_model|\breward\b",
    "vision": r"(?<![a-z])vision|pixel|image_grid",
}
# folder of a feature that has another name
FOLDERS = {"vision": {"modalities"}}
TASK_COMPARISON = re.compile(r"""\btask\b[^#\n]{0,24}(==|!=|\bin\b)\s*["'({\[]|["']\s*==\s*[\w.]*\btask\b""")
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert, ast.match_case)
MAX_COMPLEXITY = 15
MAX_ARGUMENTS = 8

OPS = ("rms_norm", "linear_cross_entropy", "document_attention", "experts")

Places = dict[str, list[str]]
Graph = dict[str, list[str]]  # module -> those that it imports


def measure(sources: dict[str, Path]) -> Places:
    """Return name of a number -> the places that it counts. sources: dotted name of a module -> its file."""
    found: Places = defaultdict(list)
    for name, path in sources.items():
        text = path.read_text(encoding="utf-8")
        for number, line in _places_in(path):
            found[number].append(f"{name}:{line}")
        for feature, words in FEATURES.items():
            if not FOLDERS.get(feature, {feature}) & set(name.split(".")) and re.search(words, text, re.IGNORECASE):
                found[f"files that name {feature}"].append(name)
        if ".features." not in name:
            lines = enumerate(text.splitlines(), 1)
            found["comparisons of the task"] += [f"{name}:{n}" for n, line in lines if TASK_COMPARISON.search(line)]
    graph = {name: _imported_modules(path, sources) for name, path in sources.items()}
    found["packages that import each other"] = _mutual_packages(graph)
    found["modules of the longest chain of imports"] = _longest_chain(graph)
    for op in OPS:
        found[f"files of ops that {op} reaches"] = _reached_op_files(op, graph)
    found["names imported by run.py"] = list(_imported_names(tree_of(sources["ligertune.run"])))
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which several numbers and rules are read from."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree. To walk through all files takes half a second each time."""
    return tuple(ast.walk(tree_of(path)))


def _places_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name of a number, line) for each place in a module."""
    for node in nodes_of(path):
        if isinstance(node, ast.Assign) and all(isinstance(part, ast.Tuple) for part in (node.targets[0], node.value)):
            yield "tuple assignments", node.lineno
        elif isinstance(node, ast.Call) and any(_is_made_from_mapping(keyword) for keyword in node.keywords):
            yield "constructions by **", node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
            if len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) > MAX_ARGUMENTS:
                yield f"functions with more than {MAX_ARGUMENTS} arguments", node.lineno
            if _complexity(node) > MAX_COMPLEXITY:
                yield f"functions of a complexity over {MAX_COMPLEXITY}", node.lineno


def _is_made_from_mapping(keyword: ast.keyword) -> bool:
    value = keyword.value
    from_vars = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "vars"
    return keyword.arg is None and (from_vars or isinstance(value, ast.Dict))


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _complexity(function: ast.AST) -> int:
    """Return McCabe's number, with boolean operators and filters of comprehensions."""
    total = 1
    for node in ast.walk(function):
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += len(node.ifs)
    return total


def _imported_modules(path: Path, sources: Container[str]) -> list[str]:
    """Return the modules of `sources` that a file imports, in functions too."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return sorted(filter(sources.__contains__, found))


def _mutual_packages(graph: Graph) -> list[str]:
    """Return the pairs of packages, such as ligertune.data, whose modules import each other."""
    edges = {(_package_of(name), _package_of(module)) for name, modules in graph.items() for module in modules}
    return sorted(f"{one} and {other}" for one, other in edges if one < other and (other, one) in edges)


def _longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of modules in which each imports the next."""
    chains: dict[str, list[str]] = {}

    def chain_of(name: str, above: frozenset[str]) -> list[str]:
        if name not in chains:
            below = [chain_of(module, above | {name}) for module in graph[name] if module not in above | {name}]
            chains[name] = [name, *max(below, key=len, default=[])]
        return chains[name]

    return max((chain_of(name, frozenset()) for name in graph), key=len)


def _reached_op_files(op: str, graph: Graph) -> list[str]:
    """Return the files of ops/ that the module of an op reaches by imports, itself included."""
    to_visit = [name for name in graph if ".ops." in name and name.endswith(f".{op}")]
    reached: set[str] = set()
    while to_visit:
        name = to_visit.pop()
        if name not in reached and ".ops." in name:
            reached.add(name)
            to_visit += graph[name]
    return sorted(name for name in reached if not any(other.startswith(f"{name}.") for other in graph))


def _package_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.name for alias in node.names)
