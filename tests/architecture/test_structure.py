"""The shape of the house: floors, doors, sizes, and what the wheel holds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "Dockerfile.cuda", "Dockerfile.rocm", "LICENSE", "README.md",
    "configs", "kernels", "ligertune", "pyproject.toml", "scripts", "tests",
}  # fmt: skip

# A module imports from its own package or from lower floors. Siblings on one floor do not know each other,
# unless a row stands before another: `plan` reads machine, memory and recipe.
FLOORS = (
    ("errors", "optimizer_states", "imports"),
    ("disk", "folders", "host_memory", "phases"),
    ("machine", "slurm", "memory", "activations", "recipe", "metrics"),
    ("heads_memory",),
    ("budget", "plan_batching", "plan_float8"),
    ("plan_strategy",),
    ("plan_states", "plan_kept"),
    ("plan", "preflight", "rank_failure", "standstill"),
    ("report", "plan_fit", "curves", "plan_cuda_graphs", "plan_host"),
    ("vision",),
    ("model", "data"),
    ("medusa",),
    ("decode", "train"),
    ("medusa_run", "plan_data"),
    ("preview",),
    ("run", "ranks", "doctor", "bench", "export"),
    ("compare",),
    ("cli",),
)
FLOOR_OF = {name: level for level, names in enumerate(FLOORS) for name in names}

# library -> the places that may import it
DOORS = {
    "typer": ("cli/",),
    "rich": ("cli/",),
    "yaml": ("recipe/",),
    "pydantic": ("recipe/",),
    "accelerate": ("train/",),
    "datasets": ("data/sources",),
    "matplotlib": ("bench/plots", "compare/plots", "curves", "decode/medusa_plot"),
    "peft": ("model/lora", "model/fused_lora"),
    "PIL": ("vision/pictures",),
    "bitsandbytes": ("train/optim",),
    "torchao": ("train/optim", "model/float8"),
    "transformers": ("model/", "data/render", "vision/", "decode/"),
}
PACKAGES = ("ligertune", "kernels/ligertune_kernels")


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def place(path: Path) -> str:
    """Path inside the package, without the ending: `train/loop`."""
    return path.relative_to(ROOT / "ligertune").with_suffix("").as_posix()


def imports(path: Path, *, at_top: bool = False) -> list[str]:
    """Dotted names a file imports when it runs; with `at_top`, only those of its module level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    typing_only = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom)
        for name in [f"{inner.module}.{alias.name}" for alias in inner.names]
    }
    return [name for name in found if name not in typing_only]


@pytest.mark.parametrize("path", modules("ligertune"), ids=place)
def test_imports_point_down(path):
    own = place(path).split("/")[0]
    if own not in FLOOR_OF:
        assert own in ("__init__", "__main__")
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "ligertune" and len(parts) > 1 and parts[1] in FLOOR_OF and parts[1] != own:
            assert FLOOR_OF[parts[1]] < FLOOR_OF[own], f"{place(path)} imports {name}, which is not on a lower floor"


@pytest.mark.parametrize("path", modules("ligertune"), ids=place)
def test_dependencies_come_in_by_their_doors(path):
    for name in imports(path):
        allowed = DOORS.get(name.split(".")[0])
        if allowed:
            assert place(path).startswith(allowed), f"{place(path)} imports {name}; that belongs in {allowed}"


@pytest.mark.parametrize("path", modules("kernels/ligertune_kernels"), ids=lambda p: p.stem)
def test_kernels_stand_on_torch_and_triton_alone(path):
    outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "triton", "ligertune_kernels"}


@pytest.mark.parametrize("path", modules("ligertune"), ids=place)
def test_no_torch_at_module_level_below_model_and_in_cli(path):
    own = place(path).split("/")[0]
    if own in ("vision", "model", "data", "medusa", "decode", "train", "bench"):
        return
    heavy = {"torch", "transformers", "accelerate", "datasets", "triton", "ligertune_kernels"}
    assert not heavy & {name.split(".")[0] for name in imports(path, at_top=True)}


@pytest.mark.parametrize("path", modules(*PACKAGES, "tests"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_hold_one_thing(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_functions_fit_a_screen(path):
    """60 lines below the signature; 90 for a Triton kernel; the training loop is one piece on purpose."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and (path.name, node.name) != ("loop.py", "fit"):
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            assert node.end_lineno - node.body[0].lineno < (90 if kernel else 60), f"{node.name} is too long"


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_modules_say_what_they_are_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_the_top_level_is_the_card():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert {name.split("/")[0] for name in tracked if name} <= TOP_LEVEL


def test_kernels_is_a_folder_not_a_package():
    """A package called `kernels` would be taken for Hugging Face's own of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_package_is_in_the_wheel():
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for path in modules(*PACKAGES)}
    on_disk = {folder.as_posix().removeprefix("kernels/").replace("/", ".") for folder in folders}
    assert listed == on_disk | {"ligertune.configs"}


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
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        after = os.times()
        # of the processor, not of the clock: other tests may hold the cores meanwhile
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 0.7
