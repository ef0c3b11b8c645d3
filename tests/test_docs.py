"""README and docs: links and named files exist, and the blocks marked `bash run` run on a tiny model."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import ROOT, environment, run_here

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = ROOT / "configs" / "quickstart" / "stories260K"
DATA = ROOT / "configs" / "quickstart" / "dolly_short.jsonl"
LINK, RUNS = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)"), re.compile(r"```bash run\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_relative_links_lead_to_files(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = [re.sub(r"\]\([^)]*\)", "", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_anchors_of_links_lead_to_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text)
    inside = [(page.parent / name if name else page, anchor) for name, anchor in links if "://" not in name]
    assert [f"{path.name}#{anchor}" for path, anchor in inside if anchor not in headings(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_of_the_repository_that_a_page_names_exist(page):
    named = set(re.findall(r"(?<![\w./-])(?:scripts|configs|tests|docs)/[\w./-]*\w", page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


# written by scripts/support_matrix
GENERATED = ("families.md", "support.md")


def test_a_page_can_be_read_in_one_sitting():
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert [name for name, number in words.items() if number > 1800 and name not in GENERATED] == []


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [page for page in pages if f"](docs/{page})" not in readme] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "benchmarks").glob("*_2*.md")), ids=lambda page: page.stem)
def test_a_benchmark_page_is_of_one_device_and_can_be_repeated(page):
    text, listed = page.read_text(encoding="utf-8"), (page.parent / "README.md").read_text(encoding="utf-8")
    assert f"]({page.name})" in listed
    assert len(set(re.findall(r"\b(?:[ABHL]\d{2,3}|MI\d{3})\w?\b", text))) == 1
    assert text.count("| device |") == 1 and "versions" in text and "| date" in text
    assert text.count("scripts/") >= 1


FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?")


def measured_parts() -> list[tuple[str, list[str]]]:
    """Return (benchmark page, numbers) of the README's head and of each list item that a page proves."""
    head, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")
    items = rest.partition("\n## Commands")[0].split("\n- **")[1:]
    found = []
    for part in (head, *items):
        pages = set(re.findall(r"\]\((docs/benchmarks/\w+\.md)\)", part))
        if len(pages) == 1:
            # without links, and without names such as Llama-3.2-1B
            words = re.sub(r"\]\([^)]*\)|\b[A-Za-z][\w.-]*\d[\w.]*", "", part)
            found.append((pages.pop(), FIGURE.findall(words)))
    return found


@pytest.mark.parametrize(("page", "numbers"), measured_parts(), ids=lambda value: Path(str(value)).stem[:30])
def test_every_figure_of_the_readme_stands_on_its_page(page, numbers):
    stated = set(FIGURE.findall((ROOT / page).read_text(encoding="utf-8")))
    assert len(numbers) > 3 and [number for number in numbers if number not in stated] == []


def test_the_readme_compares_with_every_side_of_its_first_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = ROOT / "docs" / "benchmarks" / "packed_rows_llama_1b_h100_202611.md"
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+) \|[^|]+\|[^|]+\| ([\d.]+) \|", page.read_text(), re.MULTILINE)
    assert len(rows) == 4
    assert [row for row in rows if "| {} | {} | {} |".format(*row) not in readme] == []


def test_no_text_sends_anyone_to_a_package_index_for_ligertune():
    """There is no ligertune on PyPI. An extra is installed in a clone, or by the names of its packages."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    asked = re.compile(r"""install\s+(?:-\S+\s+)*['"]?ligertune(?![\w/.:-])(?!\[\w+\] @)|ligertune\[\w+\](?! @)""")
    found = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{name}: {match.group()}" for match in asked.finditer(text)]
    assert found == []


def test_the_install_lines_use_the_repository_of_pyproject():
    address = re.search(r'Homepage = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    for page in ("README.md", "docs/getting-started.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"git clone {address}" in text and f'pip install "git+{address}"' in text


def commands_of(page: Path) -> list[str]:
    """Return the lines of the blocks marked `bash run`, with the tiny model in place of the one from the hub."""
    blocks = RUNS.findall(page.read_text(encoding="utf-8"))
    lines = "\n".join(blocks).replace("\\\n", " ").replace("Qwen/Qwen2.5-0.5B", str(MODEL)).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = DATA.read_text(encoding="utf-8").splitlines()[:200]
    (tmp_path / "my_data.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path


def test_the_commands_of_getting_started_run(folder):
    for line in commands_of(ROOT / "docs" / "getting-started.md"):
        program, *arguments = shlex.split(line, comments=True)
        assert program == "ligertune", line
        done = run_here(*arguments, cwd=folder)
        assert done.code == 0, f"{line}\n{done.out}\n{done.err}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=str)
def test_commands_run(page, folder):
    (folder / "bin").mkdir()
    tool = folder / "bin" / "ligertune"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ligertune "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    path = os.pathsep.join((str(tool.parent), os.environ["PATH"]))
    script = "set -e\n" + "\n".join(commands_of(page))
    done = subprocess.run(["bash", "-c", script], cwd=folder, env={**environment(), "PATH": path},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
