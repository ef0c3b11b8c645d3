"""Run the README's first commands on the bundled model, and draw what they print as docs/first_run.svg.

    python scripts/generated_pages/first_run.py [--out docs/first_run.svg]

The commands run in a temporary folder, on the 200 rows of configs/quickstart, with all that they print on stdout. Long
outputs are cut where a line `...` stands.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"
WIDTH = 116
# command -> numbers of the lines that are shown, from 0; those below 0 count from the end
SHOWN = {
    "ligertune init stories260K my_data.jsonl --set checkpoint.output_dir=runs/first --set data.max_length=512"
    " --set train.learning_rate=2e-3": range(0, 2),
    "ligertune plan recipe.yaml": range(0, 16),
    "ligertune train recipe.yaml --set train.max_steps=40": range(-24, -2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "first_run.svg")
    options = parser.parse_args()
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    with tempfile.TemporaryDirectory(prefix="ligertune-first-run-") as name:
        folder = Path(name)
        shutil.copytree(QUICKSTART / "stories260K", folder / "stories260K")
        shutil.copy(QUICKSTART / "dolly_short.jsonl", folder / "my_data.jsonl")
        for command, lines in SHOWN.items():
            record(console, command, lines, folder)
    drawn = console.export_svg(title="ligertune")
    without_addresses = re.sub(r"src: local\((.*?)\),.*?;", r"src: local(\1);", drawn, flags=re.DOTALL)  # of fonts
    options.out.write_text(without_addresses, encoding="utf-8")
    print(f"written: {options.out}")


def record(console: Console, command: str, lines: range, folder: Path) -> None:
    """Run a command, and print it with the chosen lines of its output. Exits with its output if it fails."""
    console.print(Text(f"$ {command}", style="bold green"))
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": str(WIDTH)}
    words = command.replace("ligertune", f"{sys.executable} -m ligertune", 1)
    done = subprocess.run(words, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    printed = done.stdout.rstrip().splitlines()
    chosen = [printed[number] for number in lines if -len(printed) <= number < len(printed)]
    if lines.start < 0 and len(printed) > -lines.start:
        console.print(Text("..."))
    for line in chosen:
        console.print(Text(line.replace(f"{sys.executable} -m ligertune", "ligertune").replace(str(folder), ".")))
    if lines.start >= 0 and len(printed) > lines.stop:
        console.print(Text("..."))
    console.print()


if __name__ == "__main__":
    main()
