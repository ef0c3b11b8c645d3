"""Links, pipes and folders where a command writes, damaged files of a run that is resumed, and disks that fill up."""

import json
import os
import resource
import shutil
import time
from pathlib import Path

import pytest
from support.command_line import RECIPE, Done, metrics, overrides, run_here
from support.quickstart_runs import RESUME, SHORT, saves, train, unfinished

SETTINGS = {"train.max_steps": 4, **saves(2), "checkpoint.save_total_limit": 3}
OUT = {"checkpoint.output_dir": "run", "train.num_train_epochs": "null"}
FILES = ("report.html", "resolved_recipe.yaml", "plan.json", "curves.png", "metrics.jsonl")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run of four steps without its report and its last checkpoint, as after a kill."""
    folder = tmp_path_factory.mktemp("stopped")
    train(folder, **SETTINGS)
    shutil.rmtree(unfinished(folder) / "checkpoints" / "step-4", ignore_errors=True)
    return folder


@pytest.fixture
def place(stopped, tmp_path) -> Path:
    """A folder with a copy of the run in run/, and a folder outside/ that must stay unchanged."""
    shutil.copytree(stopped / "run", tmp_path / "run")
    (tmp_path / "outside" / "folder").mkdir(parents=True)
    (tmp_path / "outside" / "folder" / "mine").write_text("mine")
    return tmp_path


def resume(place: Path) -> Done:
    return run_here("train", RECIPE, *overrides({**SHORT, **SETTINGS, **RESUME, **OUT}), cwd=place)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sentence(done: Done, code: int = 2) -> str:
    errors = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert done.code == code and len(errors) == 1 and "Traceback" not in done.err, done.err[-3000:]
    return errors[0]


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_resumed_run_replaces_links_and_writes_nothing_outside(link, place):
    run, outside = place / "run", place / "outside"
    for name in FILES:
        (run / name).touch()
        shutil.move(run / name, outside / name)
        link(outside / name, run / name)
    if link is os.symlink:
        for name in ("model", "best", ".model.partial", "checkpoints/.step-4.partial"):
            shutil.rmtree(run / name, ignore_errors=True)
            os.symlink(outside / "folder", run / name)
        os.symlink(outside / "folder" / "mine", run / "checkpoints" / ".rehearsal")
        os.symlink(outside / "none", run / "report.json")
    before = content(outside)
    done = resume(place)
    assert done.code == 0, done.err[-3000:]
    assert content(outside) == before and not (outside / "none").exists()
    assert json.loads((run / "report.json").read_text())["resumed_from"] == 2
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4]
    assert not (run / "model").is_symlink() and (run / "model" / "model.safetensors").is_file()
    assert all(not (run / name).is_symlink() and (run / name).stat().st_nlink == 1 for name in FILES)


IN_THE_WAY = {
    "report.html": (os.mkfifo, "a named pipe"),
    "plan.json": (os.mkdir, "a folder"),
    "metrics.jsonl": (os.mkfifo, "a named pipe"),
    "report.json": (os.mkfifo, "a named pipe"),
    "curves.png": (lambda path: os.symlink("/dev/zero", path), "a link to /dev/zero"),
    "checkpoints": (lambda path: os.symlink("../outside/folder", path), "a link to ../outside/folder"),
    "profile": (lambda path: os.symlink("../outside/folder", path), "a link to ../outside/folder"),
    "medusa": (lambda path: path.write_text(""), "a file"),
    ".run.lock": (lambda path: os.symlink("../outside/none", path), "a link to ../outside/none"),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_is_refused_before_the_first_step(name, place):
    make, what = IN_THE_WAY[name]
    path = place / "run" / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    before, start = content(place / "outside"), time.monotonic()
    said = sentence(resume(place))
    assert time.monotonic() - start < 20  # a pipe is not waited for
    assert f"run/{name} is {what}" in said and content(place / "outside") == before


def test_a_run_with_damaged_lines_is_resumed(place):
    path = place / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()[:3]
    damaged = (
        '{"step": -5, "loss": 1.0}',
        f'{{"step": 1, "loss": 1.0, "tokens": {"9" * 400}}}',
        '{"step": 1, "samples": {}}',
        '{"step": 1, "eval_accuracy": [1]}',
        f'{{"step": {2**60}, "loss": 1.0}}',
        lines[1],
    )
    path.write_text("".join(f"{line}\n" for line in (*lines[:2], *damaged, lines[2])))
    done = resume(place)
    assert done.code == 0, done.err[-3000:]
    report = json.loads((place / "run" / "report.json").read_text())
    assert "metrics.jsonl has 6 damaged lines, whose numbers are lost (lines 3, 4, 5, 6, 7, 8)" in str(report["notes"])
    assert report["tokens"] < 10**9 and (place / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", RECIPE, "--out"),
        ("compare", RECIPE, "--out"),
        ("bench", "rms_norm", "--plots"),
        ("export", "run", "--out"),
        ("init", "run/model", RECIPE, "--out"),
        ("recipe", "import", "axolotl.yml", "--out"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_each_output_option_refuses_places_that_cannot_hold_it(arguments, place):
    (place / "file").write_text("mine")
    (place / "axolotl.yml").write_text("base_model: m\ndatasets: [{path: d, type: alpaca}]\noutput_dir: o\n")
    os.mkfifo(place / "pipe")
    os.symlink("loop", place / "loop")
    before = sorted(path.name for path in place.iterdir())
    for where in ("file/below", "pipe", "/proc/none/x", "loop/below", "x" * 300, "a/" * 3000, ""):
        said = sentence(run_here(*arguments, where, cwd=place))
        assert where[:10] in said, said
    assert (place / "file").read_text() == "mine" and sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_export_to_a_full_disk_is_one_sentence_and_leaves_nothing(method, tmp_path):
    """A limit on the size of a file stands for a full disk."""
    changes = {"method.type": method, "train.max_steps": 1, "data.datasets.0.max_samples": 20}
    train(tmp_path, **changes)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    try:
        done = run_here("export", "run", "--out", "e", cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "The export to e could not be written: File too large." in sentence(done, code=1)
    assert "--resume" not in done.err and [path.name for path in tmp_path.iterdir()] == ["run"]
    for name, make in (("secret", lambda path: os.symlink("/etc/passwd", path)), ("pipe", os.mkfifo)):
        make(tmp_path / "run" / "model" / name)
        if method == "full":  # the folder is copied as it is
            assert f"run/model/{name} is" in sentence(run_here("export", "run", "--out", "e", cwd=tmp_path))
            (tmp_path / "run" / "model" / name).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
