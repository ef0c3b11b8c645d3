"""Pages of docs/benchmarks: Markdown and one chart, written from the rows of one run on one device.

A benchmark measures, then calls `publish`, which prints the table and one JSON line with all that the page needs.
`--page FOLDER` writes the page, too. `--from FILE` writes it later from that line: FILE is the printed output. Charts
need matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.charts import draw
from ligertune.files.plots import has_matplotlib

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
MARK = '{"page": '  # how the JSON line of a page starts
PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "datasets", "torchao", "bitsandbytes",
            "liger-kernel", "trl", "flash-attn-4")  # fmt: skip
NOT_THE_CHIP = re.compile(r"NVIDIA|AMD|Instinct|GeForce|\d+GB|HBM\w*|PCIe|SXM\d?")
OWN = {"--page", "--out", "--from", "--commit"}  # options that change no number
ON_A_CPU = (
    "This run is on a CPU, where the kernels' PyTorch reference runs: it tests the script, and its speed means nothing."
)


@dataclass(frozen=True)
class Page:
    """Everything on a page.

    page: its file name without device and month. columns: [key of a row, header, format]. left_out: why sides have no
    row. chart: its kind ("bars", "dots", "lines" or "curves") and what it shows.
    """

    page: str
    title: str
    intro: str
    caveats: list[str]
    columns: list[list[str]]
    rows: list[dict[str, Any]]
    device: str
    count: int
    versions: dict[str, str]
    date: str
    commit: str
    command: str
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    chart: dict[str, Any] | None = None

    @property
    def devices(self) -> str:
        return f"{self.count} x {self.device}" if self.count > 1 else self.device

    @property
    def file_name(self) -> str:
        words = [word for word in re.split(r"[\s-]+", NOT_THE_CHIP.sub("", self.device)) if word]
        hardware = "".join(words).lower()
        return f"{self.page}_{f'{self.count}x' if self.count > 1 else ''}{hardware}_{self.date[:7].replace('-', '')}"


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments after the name of the benchmark."""
    parser.prog = " ".join(["scripts/bench", *sys.argv[1:2]])
    return parser.parse_args(sys.argv[2:])


def parse(
    parser: argparse.ArgumentParser, join: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None
) -> argparse.Namespace:
    """Parse the arguments of a benchmark, with the options of its page. Ends the process after --from.

    join: makes one page of those with one name in the file of --from, which several runs printed, oldest first. Without
    it the last one is written.
    """
    group = parser.add_argument_group("page")
    group.add_argument("--page", type=Path, metavar="FOLDER", help="write the page and its chart here: docs/benchmarks")
    group.add_argument("--from", dest="saved", type=Path, metavar="FILE",
                       help="measure nothing; write --page from what an earlier run printed")  # fmt: skip
    group.add_argument("--commit", help="commit of the tree (default: git's)")
    options = parse_arguments(parser)
    if not options.saved:
        return options
    if not options.page:
        parser.error("--from needs --page FOLDER")
    lines = options.saved.read_text(encoding="utf-8").splitlines()
    commit = {"commit": options.commit} if options.commit else {}
    printed: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line.startswith(MARK):
            page = json.loads(line)
            printed.setdefault(page["page"], []).append(page)
    if not printed:
        parser.error(f"--from: no line of {options.saved} starts with {MARK}")
    for pages in printed.values():
        page = join(pages) if join else pages[-1]
        write(Page(**{**page, **commit}), options.page)
    raise SystemExit(0)


def joined(pages: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Return the newest page with the rows, texts and commands of all.

    keys: fields that rows have in common if they are compared. A newer page's rows replace all older ones of the same
    comparison, so that each comparison comes from one run. A newer remark replaces one that begins with the same words,
    up to a colon.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for page in pages:
        own: dict[tuple, list[dict[str, Any]]] = {}
        for row in page["rows"]:
            own.setdefault(tuple(row.get(key) for key in keys), []).append(row)
        groups |= own
    remarks = {remark.split(":")[0]: remark for page in pages for remark in page["remarks"]}
    columns = {column[0]: column for page in pages for column in page["columns"]}
    texts = {
        name: list(dict.fromkeys(text for page in pages for text in page[name])) for name in ("caveats", "left_out")
    }
    return pages[-1] | {
        **texts,
        "rows": [row for group in groups.values() for row in group],
        "remarks": list(remarks.values()),
        "columns": list(columns.values()),
        "command": "; ".join(dict.fromkeys(page["command"] for page in pages)),
    }


def publish(options: argparse.Namespace, *, count: int = 1, **fields: Any) -> None:
    """Print the table and the JSON line of a page, and write it where --page says. count: number of devices."""
    page = Page(**fields, **_machine(), count=count, date=time.strftime("%Y-%m-%d"),
                commit=options.commit or _commit(), command=command_line())  # fmt: skip
    filled = [column for column in page.columns if any(row.get(column[0]) not in (None, "") for row in page.rows)]
    page = dataclasses.replace(page, columns=filled)
    if page.device == "CPU":
        page = dataclasses.replace(page, caveats=[ON_A_CPU, *page.caveats])
    print("\n".join(["", f"# {page.title}", *page.left_out, *_table(page), *page.remarks]))
    print(json.dumps(dataclasses.asdict(page)), flush=True)
    if options.page:
        write(page, options.page)


def write(page: Page, folder: Path) -> None:
    """Write FOLDER/<page>_<hardware>_<yyyymm>.md and its chart."""
    folder.mkdir(parents=True, exist_ok=True)
    path, picture = folder / f"{page.file_name}.md", folder / f"{page.file_name}.png"
    drawn = bool(page.chart and page.rows) and has_matplotlib()
    if drawn:
        draw(page, picture)
    path.write_text(markdown(page, picture.name if drawn else None), encoding="utf-8")
    print(f"Wrote {path}{f' and {picture.name}' if drawn else ''}")
    if page.chart and not drawn:
        print("No chart: matplotlib is not installed. Save this output and pass it to --from where it is.")


def markdown(page: Page, picture: str | None) -> str:
    """Return the text of a page. picture: file name of its chart."""
    script = page.command.split()[0]
    versions = ", ".join(f"{name} {version}" for name, version in page.versions.items())
    intro = f"{page.intro} Measured on {page.devices}, {page.date}."
    lines = [f"# {page.title}", "", textwrap.fill(intro, 120), "", "## Caveats"]
    lines += [textwrap.fill(f"- {caveat}", 120, subsequent_indent="  ") for caveat in page.caveats]
    lines += ["", "## Result"]
    for sentence in page.left_out:
        lines += [textwrap.fill(sentence, 120), ""]
    lines += _table(page)
    for sentence in page.remarks:
        lines += ["", textwrap.fill(sentence, 120)]
    if picture:
        lines += ["", f"![{page.title}: the table as a chart]({picture})"]
    lines += ["", "## Setup", "| | |", "|---|---|", f"| device | {page.devices} |", f"| versions | {versions} |"]
    lines += [f"| date, commit | {page.date}, {page.commit or 'not recorded'} |"]
    lines += [f"| script | [{script}](../../{script}) |", "", "## Reproduce", "```bash", page.command, "```"]
    if "--corpus FOLDER" in page.command:
        lines += ["", "`FOLDER` is the folder of the test data. No model weights are needed."]
    return "\n".join([*lines, "", "All pages: [list](README.md)."]) + "\n"


def _table(page: Page) -> list[str]:
    lines = ["| " + " | ".join(header for _, header, _ in page.columns) + " |", "|---" * len(page.columns) + "|"]
    for row in page.rows:
        cells = ["" if row.get(key) is None else format(row[key], how) for key, _, how in page.columns]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


@functools.cache
def _machine() -> dict[str, Any]:
    """Return the device and the versions. Another process asks torch, so that this one holds no memory of the GPU."""
    code = (
        "import json, torch; gpu = torch.cuda.is_available(); "
        "print(json.dumps([torch.cuda.get_device_name() if gpu else 'CPU', torch.version.cuda, torch.version.hip]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    device, cuda, rocm = json.loads(said.splitlines()[-1])
    installed = {name: _version(name) for name in PACKAGES}
    versions = {name: version for name, version in {"CUDA": cuda, "ROCm": rocm, **installed}.items() if version}
    return {"device": device, "versions": versions}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def command_line() -> str:
    """Return the command line to repeat the run, without paths of this machine."""
    kept, skip = ["scripts/bench"], False
    for argument in sys.argv[1:]:
        name, equals, _ = argument.partition("=")
        if skip or name in OWN:
            skip = not skip and not equals
        elif name == "--corpus" or kept[-1] == "--corpus":
            kept += ["--corpus"] if name == "--corpus" and not equals else ["FOLDER"]
        elif kept[-1] == "--site":
            kept.append(f"{name}=SITE")
        else:
            kept.append(argument)
    return shlex.join(kept)
