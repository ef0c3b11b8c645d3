"""The lock of a run's folder: held by one run, released at its end, taken over from a run that was killed."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.command_line import RECIPE, run_here
from support.quickstart_runs import plan_run

from ligertune.errors import UserError
from ligertune.launcher import run_lock
from ligertune.launcher.run_lock import ENDED_AFTER, LOCK_FILE, check_not_in_use, locked_folder
from ligertune.launcher.signals import before_leaving

HERE = f"process {os.getpid()} on {platform.node()}, started "


def leave(folder: Path, *, age: float = 0.0, **changes: object) -> Path:
    """Write the lock of this process with changes, as a killed run leaves it; age: seconds since its last sign."""
    path = folder / LOCK_FILE
    path.unlink(missing_ok=True)
    with locked_folder(folder):
        holder = json.loads(path.read_text())
    path.write_text(json.dumps({**holder, "token": "left over", **changes}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    "options", [(), ("--overwrite",), ("--resume",), ("--report",)], ids=lambda options: " ".join(options) or "alone"
)
def test_a_second_run_is_refused_and_told_who_holds_the_folder(options, tmp_path):
    command = ("medusa",) if "--report" in options else ("train", RECIPE)
    with locked_folder(tmp_path / "run"):
        done = run_here(*command, *options, "--set", "checkpoint.output_dir=run", cwd=tmp_path)
        assert (done.code, [path.name for path in (tmp_path / "run").iterdir()]) == (2, [LOCK_FILE])
    assert f"checkpoint.output_dir: run is in use by a run ({HERE}" in done.err
    assert "Wait until it has ended, or name another folder." in done.err


def test_a_run_that_was_planned_while_another_one_trained_is_refused(tmp_path):
    """Both passed the first check of the folder; the second one must not mix its files with those of the first."""
    from ligertune.run import run

    job = plan_run(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError, match="already holds a run"):
        run(job, lambda line: None)
    with locked_folder(tmp_path / "run"), pytest.raises(UserError, match="is in use by a run"):
        run(job, lambda line: None)


def test_folders_that_it_made_are_removed_unless_something_was_written(tmp_path):
    with locked_folder(tmp_path / "runs" / "one"):
        assert (tmp_path / "runs" / "one" / LOCK_FILE).is_file()
    assert not list(tmp_path.iterdir())
    with locked_folder(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "one" / "plan.json").write_text("{}")
    assert [path.name for path in (tmp_path / "runs" / "one").iterdir()] == ["plan.json"]


def test_the_lock_of_a_killed_run_is_taken_over_and_said(tmp_path, capfd):
    leave(tmp_path, processes={ended_process(): 0})
    (tmp_path / f"{LOCK_FILE}.123").touch()  # the kill came while it took the lock
    check_not_in_use(tmp_path)
    with locked_folder(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] != "left over"
    assert f"The run that used {tmp_path} before was killed (process " in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_process_id_that_another_program_got_holds_nothing(tmp_path):
    leave(tmp_path, processes={os.getpid(): 1})  # this process was not started one tick after the boot
    with locked_folder(tmp_path):
        pass


def test_a_rank_that_outlives_its_launcher_holds_the_lock(tmp_path):
    own = run_lock.RunHolder.here().processes
    leave(tmp_path, processes={ended_process(): 0, **own})
    with pytest.raises(UserError, match="is in use by a run"), locked_folder(tmp_path):
        pass


@pytest.mark.parametrize("elsewhere", [{"host": "node7"}, {"place": "another container"}, {"place": ""}])
def test_a_run_elsewhere_holds_the_lock_as_long_as_it_gives_signs_of_life(elsewhere, tmp_path):
    ended = ended_process()  # means nothing on the other host
    leave(tmp_path, processes={ended: 0}, age=ENDED_AFTER / 2, **elsewhere)
    with pytest.raises(UserError, match=r"its last sign of life was 1:3\d ago.*after 180 seconds") as refused:
        check_not_in_use(tmp_path)
    assert refused.value.exit_code == 2 and f"process {ended} on " in str(refused.value)
    leave(tmp_path, age=ENDED_AFTER + 1, **elsewhere)
    with locked_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b'{"processes": []}', b'{"processes": {}}'])
def test_an_unreadable_lock_counts_by_its_age(content, tmp_path):
    path = leave(tmp_path)
    path.write_bytes(content)
    with pytest.raises(UserError, match="another process that is just starting"), locked_folder(tmp_path):
        pass
    os.utime(path, (0, 0))
    with locked_folder(tmp_path):
        pass


def test_one_of_many_takes_over(tmp_path):
    leave(tmp_path, processes={ended_process(): 0})
    won, refused, start, end = [], [], threading.Barrier(8), threading.Event()

    def try_it() -> None:
        start.wait()
        try:
            with locked_folder(tmp_path):
                won.append(1)
                end.wait(20)
        except UserError:
            refused.append(1)
            if len(refused) == 7:
                end.set()

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    assert not list(tmp_path.iterdir())


def test_a_run_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "SIGN_OF_LIFE", 0.02)
    with locked_folder(tmp_path):
        os.utime(tmp_path / LOCK_FILE, (0, 0))
        end = time.monotonic() + 10
        while (tmp_path / LOCK_FILE).stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.02)
        assert (tmp_path / LOCK_FILE).stat().st_mtime > time.time() - 60


LOSES = """
import sys, time
from pathlib import Path
from ligertune.launcher import run_lock
run_lock.SIGN_OF_LIFE = 0.05
with run_lock.locked_folder(Path("run")):
    lock = Path("run") / run_lock.LOCK_FILE
    lock.write_text(lock.read_text().replace('"token": "', '"token": "of another run'))
    time.sleep(60)
"""


def test_a_run_whose_lock_was_taken_over_ends_and_leaves_the_lock(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOSES]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Another run has taken over run" in done.stderr, done.stderr
    assert "of another run" in (tmp_path / "run" / LOCK_FILE).read_text()


def test_only_the_process_that_registered_an_action_runs_it_before_leaving(tmp_path):
    """A forked child of a run inherits its handlers, and must not release the run's lock."""
    from ligertune.launcher import signals

    ends = {}
    for name in ("child", "process"):
        if (pid := os.fork()) == 0:
            with before_leaving((tmp_path / name).touch):
                if name == "process" or os.fork() == 0:
                    signals.leave_at_once(signals.signal.SIGTERM, None)
                os.wait()
                os._exit(0)
        ends[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ends == {"child": 0, "process": 130}
    assert [path.name for path in tmp_path.iterdir()] == ["process"]


@pytest.mark.parametrize("name", [LOCK_FILE, LOCK_FILE + run_lock.TAKEOVER])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "a named pipe"),
        (os.mkdir, "a folder"),
        (lambda path: path.symlink_to("none"), "a link to none"),
        (lambda path: path.symlink_to("/dev/zero"), "a link to /dev/zero"),
        (lambda path: path.symlink_to("mine"), "a link to mine"),
    ],
    ids=["pipe", "folder", "dangling link", "device", "link"],
)
def test_a_lock_that_is_no_file_is_refused_and_left_alone(make, what, name, tmp_path):
    """A pipe would be waited for, and a dangling link counts as released and can never be created."""
    (tmp_path / "mine").write_text("mine")
    if name != LOCK_FILE:
        leave(tmp_path, processes={ended_process(): 0})
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"the lock .*/{name} is {what}, and not the file that a run makes"), \
            locked_folder(tmp_path):  # fmt: skip
        raise AssertionError("two runs would write here")
    if name == LOCK_FILE:
        with pytest.raises(UserError, match="and not the file that a run makes"):
            check_not_in_use(tmp_path)
    assert os.path.lexists(tmp_path / name) and (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        "[]",
        "{",
        '{"processes": {"1": 1e999}}',
        '{"processes": {"x": 1}}',
        '{"processes": []}',
        "9" * 5000,
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_lock_counts_as_that_of_a_run_that_just_starts(text, tmp_path):
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(UserError, match="is in use by a run \\(another process that is just starting"):
        check_not_in_use(tmp_path)
    old = time.time() - 2 * ENDED_AFTER
    os.utime(tmp_path / LOCK_FILE, (old, old))
    with locked_folder(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == platform.node()
