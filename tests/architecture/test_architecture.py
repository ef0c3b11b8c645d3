"""Layout rules: layers, cycles, sizes of folders and functions, names, and the one home of each dependency."""

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from support.structure import measure, nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"ligertune": ROOT / "ligertune", "ligertune_kernels": ROOT / "kernels" / "ligertune_kernels"}
TOP_LEVEL = {
    "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "ligertune", "kernels", "configs",
    "docs", "tests", "scripts", "Dockerfile.cuda", "Dockerfile.rocm",
}  # fmt: skip
# modules of which each feature or op may have one: its folder is their name
PARTS = {"__init__", "recipe", "spec", "command", "task", "loss", "data", "memory", "report", "op", "kernels", "tiles"}
MAX_FILES, MAX_TOP_LEVEL_MODULES = 12, 9
MAX_LINES, MAX_KERNEL_LINES = 60, 90
# number of the structure -> (budget, goal); structure.py says what is counted
BUDGETS = {
    "tuple assignments": (22, 25),
    "constructions by **": (0, 0),
    "functions with more than 8 arguments": (19, 20),
    "functions of a complexity over 15": (3, 3),
    "comparisons of the task": (0, 0),
    "packages that import each other": (0, 0),
    "names imported by run.py": (17, 20),
    "modules of the longest chain of imports": (22, 22),
    "files of ops that rms_norm reaches": (3, 3),
    "files of ops that linear_cross_entropy reaches": (6, 6),
    "files of ops that document_attention reaches": (6, 6),
    "files of ops that experts reaches": (5, 5),
    "files that name medusa": (2, 6),
    "files that name distill": (2, 6),
    "files that name preference": (4, 6),
    "files that name scores": (8, 6),
    "files that name vision": (2, 6),
}
MAX_COMPLEX = 45  # functions of cyclomatic complexity over 10; ruff refuses those over 15

# Lowest first. A module imports from its own layer and from lower ones.
LAYERS = (
    ("errors", "any_types", "untraced_inputs", "hardware", "files", "progress"),
    ("recipe",),
    ("planning",),
    ("launcher",),
    ("data", "attention", "patching", "models", "activations"),
    ("features", "decode", "serving"),
    ("training", "gguf_export"),
    ("run", "trainer", "report"),
    ("bench", "compare", "doctor", "evaluation"),
    ("cli", "__init__", "__main__"),
)

# library -> the only places that may import it
HOMES = {
    "typer": ("cli", "features/*/command"),
    "rich": ("cli",),
    "yaml": ("recipe",),
    "pydantic": ("recipe", "features", "data/modalities"),
    "accelerate": ("training",),
    "datasets": ("data",),
    "matplotlib": ("files/plots",),
    "peft": ("models", "patching/experts/expert_lora", "patching/lora/fused_lora"),
    "PIL": ("data/modalities/image",),
    "bitsandbytes": ("training/optim",),
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of both packages."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> list[tuple[str, str]]:
    """(module, imported name) of every import of a module, also inside functions and under TYPE_CHECKING."""
    return imports_in(modules()[name])


def imports_in(path: Path) -> list[tuple[str, str]]:
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [
                (full, "") if (full := f"{node.module}.{alias.name}") in modules() else (node.module, alias.name)
                for alias in node.names
            ]
    return found


def own_imports(name: str) -> Iterator[str]:
    yield from (module for module, _ in imports(name) if module in modules() and module != name)


def place(name: str) -> str:
    """The module's path inside its package, without suffix: data/rows/files."""
    package = name.split(".")[0]
    return modules()[name].relative_to(PACKAGES[package]).with_suffix("").as_posix()


def layer(name: str) -> int:
    top = place(name).split("/")[0]
    if fnmatch(place(name), "features/*/command"):  # part of the command line, which loads it by name
        top = "cli"
    return next(number for number, packages in enumerate(LAYERS) if top in packages)


def test_folders_are_small_and_the_top_level_is_listed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name.split("/")[0] for name in tracked.splitlines()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL
    folders = Counter(path.parent for path in modules().values())
    top = len(list(PACKAGES["ligertune"].glob("*.py")))
    assert top <= MAX_TOP_LEVEL_MODULES, top
    assert not {str(folder): count for folder, count in folders.items() if count > MAX_FILES}


def test_no_import_points_up_a_layer():
    assert len(LAYERS) <= 10
    up = [
        f"{name} imports {other}"
        for name in modules()
        for other in own_imports(name)
        if name.split(".")[0] == other.split(".")[0] == "ligertune" and layer(other) > layer(name)
    ]
    up += [f"{name} imports {other}" for name in modules() for other in own_imports(name)
           if name.startswith("ligertune_kernels") and not other.startswith("ligertune_kernels")]  # fmt: skip
    assert not up


def test_no_modules_import_each_other():
    """Cycles of any length, also through function-level imports and TYPE_CHECKING."""
    remaining = {name: set(own_imports(name)) for name in modules()}
    while leaves := [name for name, others in remaining.items() if not others & set(remaining)]:
        for name in leaves:
            del remaining[name]
    assert not sorted(remaining)


def test_no_private_name_is_imported_from_another_file():
    private = [
        f"{name} imports {imported} from {module}"
        for name in modules()
        for module, imported in imports(name)
        if module.split(".")[0] in PACKAGES and imported.startswith("_") and not imported.startswith("__")
    ]
    assert not private


def test_names_of_modules_and_public_names_are_unique():
    """Except in cli/, whose commands share names with what they run, and parts that each feature or op has."""
    outside = {name: path for name, path in modules().items() if not name.startswith("ligertune.cli")}
    stems = Counter(path.stem for path in outside.values() if path.stem not in PARTS)
    defined = Counter(
        node.name
        for path in outside.values()
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name: count for name, count in (stems + defined).items() if max(stems[name], defined[name]) > 1}


def test_no_number_of_the_structure_grows():
    """A change may lower a number, together with its budget here; the goal is what the next rebuild reaches."""
    found = measure(modules())
    above = {name: found[name] for name, (budget, _) in BUDGETS.items() if len(found[name]) > budget}
    assert not above
    slack = {name: len(found[name]) for name, (budget, _) in BUDGETS.items() if len(found[name]) < budget}
    assert not slack, "lower these budgets to what is left"


def test_functions_are_short_and_simple():
    long = []
    for name, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                lines = node.end_lineno - node.lineno + 1
                if lines > (MAX_KERNEL_LINES if is_kernel else MAX_LINES):
                    long.append(f"{name}.{node.name}: {lines} lines")
    assert not long
    ruff = [sys.executable, "-m", "ruff", "check", "--select=C901", "--config=lint.mccabe.max-complexity=10"]
    found = subprocess.run([*ruff, "--output-format=concise", "."], cwd=ROOT, capture_output=True, text=True).stdout
    complex_functions = [line for line in found.splitlines() if "C901" in line]
    assert len(complex_functions) <= MAX_COMPLEX, complex_functions


def test_each_dependency_has_one_home():
    elsewhere = [
        f"{name} imports {library}"
        for name in modules()
        if name.split(".")[0] == "ligertune"
        for module, _ in imports(name)
        if (library := module.split(".")[0]) in HOMES
        and not any(fnmatch(f"{place(name)}/", f"{home}/*") for home in HOMES[library])
    ]
    assert not elsewhere


def test_every_package_is_in_the_wheel_and_every_module_says_what_it_is():
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(settings["packages"]) == folders | {"ligertune.configs"}
    # A package named `kernels` would be taken for the one of Hugging Face.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not [name for name, path in modules().items() if not ast.get_docstring(tree_of(path))]


def defined_in(name: str) -> set[str]:
    """The names that a module binds at its top level."""
    found = set()
    for node in nodes_of(modules()[name]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_names_that_scripts_import_exist():
    """Many are imported inside functions that run on a GPU only."""
    files = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]
    files = [path for path in files if "python" in path.read_text(encoding="utf-8").partition("\n")[0]]
    files += (ROOT / "scripts").rglob("*.py")
    assert len(files) > 20
    own = [(path.name, *one) for path in files for one in imports_in(path) if one[0].split(".")[0] in PACKAGES]
    missing = [(file, module) for file, module, _ in own if module not in modules()]
    missing += [
        (file, f"{module}.{name}")
        for file, module, name in own
        # a package may export names by __getattr__
        if name and module in modules() and "." in module and name not in defined_in(module)
    ]
    assert not missing


def test_help_is_quick_and_needs_no_torch():
    code = (
        "import sys; sys.argv = ['ligertune', '--help']\n"
        "from ligertune.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = [m for m in ('torch', 'transformers', 'datasets', 'accelerate', 'pydantic') if m in sys.modules]\n"
        "assert not heavy, heavy"
    )
    seconds = []
    for _ in range(2):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        after = os.times()
        # processor time, because other tests may hold the cores
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 0.7


def test_only_the_renderers_print_or_the_text_is_escaped():
    """A file of anyone can hold escape sequences: other code prints `printable(...)`, JSON or a constant."""
    raw = []
    for name, path in modules().items():
        if name.startswith("ligertune.cli.render") or not name.startswith("ligertune."):
            continue
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or not is_output(ast.unparse(node.func)):
                continue
            text = ast.unparse(node.args[-1]) if node.args else "''"
            if not isinstance(node.args[-1], ast.Constant) and not text.startswith(("printable(", "json.dumps(")):
                raw.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    # `say`, in a signal handler, escapes its message before it adds the sequences that clear a progress bar
    assert [line.split(": ")[1] for line in raw] == ["os.write(2, f'{message}\\n'.encode())"], raw


def is_output(function: str) -> bool:
    """Return whether a function of this name writes to the terminal."""
    streams = ("stdout", "stderr")
    if function in ("print", "os.write", "typer.echo", "typer.secho", "click.echo"):
        return True
    return function.endswith((".console.print", *(f"{stream}.write" for stream in streams)))
