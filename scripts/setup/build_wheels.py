"""Build wheels of ligertune and of ligertune-kernels that are installed together from a folder.

    python scripts/setup/build_wheels.py FOLDER
    pip install --find-links FOLDER ligertune

`pip install .` puts the kernels into ligertune itself, because no index has them. Here ligertune requires
ligertune-kernels of the same version, which also works without ligertune. The folder must be empty or absent.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("ligertune", "kernels", "configs", "pyproject.toml", "README.md", "LICENSE")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    folder = Path(sys.argv[1])
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ligertune-wheels-") as name:
        tree = copy_tracked(Path(name))
        kernels = tree / "kernels"
        shutil.copy(tree / "LICENSE", kernels)
        build(kernels, folder)
        shutil.rmtree(kernels)
        project = tree / "pyproject.toml"
        project.write_text(without_kernels(project.read_text(encoding="utf-8")), encoding="utf-8")
        build(tree, folder)
    print(*sorted(path.name for path in folder.iterdir()), sep="\n")


def copy_tracked(target: Path) -> Path:
    """Copy the files that git tracks of what a wheel is made of."""
    listed = subprocess.run(["git", "ls-files", "-z", *NEEDED], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def without_kernels(project: str) -> str:
    """Return ligertune's pyproject.toml with the kernels as a requirement, in place of packages."""
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert version is not None
    project = re.sub(r'^  "ligertune_kernels[\w.]*",\n', "", project, flags=re.MULTILINE)
    project = project.replace('"ligertune_kernels" = "kernels/ligertune_kernels", ', "")
    project = re.sub(r'^"ligertune_kernels" = .*\n', "", project, flags=re.MULTILINE)
    return project.replace("dependencies = [\n", f'dependencies = [\n  "ligertune-kernels=={version[1]}",\n', 1)


def build(tree: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder.resolve()), str(tree)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
