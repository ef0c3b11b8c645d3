"""Run-folder lock: one run at a time writes to `checkpoint.output_dir`, over processes and hosts that share it.

The lock is a file that is created with O_EXCL, which every shared file system does atomically, NFS since version 3.
The system's file locks (flock, which the package filelock uses) do not keep that promise: an NFS mount with `nolock`
or `local_lock` grants them to each host, Lustre without `-o flock` refuses them, and their holder cannot be read.
filelock's `SoftFileLease` (4.3) is such a created file, too, and is not enough: it grants the lock of a killed launcher
at once although its ranks still save; it takes over from another host only after it has watched the lock for the whole
lease, however old it is; and after two seconds it replaces a link or a pipe in its place.

A created file outlives its process, so it says who holds it, and a thread renews its modification time:

- On the same host (same boot, same process namespace) the run has ended when none of its processes exists. A process
  id that the system gave to another program does not count: the start times of processes are compared.
- Elsewhere, and without /proc, the run counts as ended after ENDED_AFTER seconds without a sign of life. Both times
  come from the file system that holds the folder, so the hosts' clocks may differ.

A run that was suspended for that long and then finds the lock with another run ends at once, without saving.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ligertune.errors import UserError, format_duration
from ligertune.files.checked_files import parse_json_text
from ligertune.files.storage import name_kind, utc_now
from ligertune.launcher.signals import before_leaving, say

LOCK_FILE = ".run.lock"
OUTPUT_DIR = "checkpoint.output_dir"  # the key that most messages name
SIGN_OF_LIFE = 15.0  # seconds between two renewals
# Seconds. NFS may show a modification time that is a minute old.
ENDED_AFTER = 180.0
TAKEOVER = ".takeover"  # suffix: the process that creates this file may replace a lock that is left over
FIRST_BLOCK = 1 << 16  # bytes of a lock file that are read: those of a run with 2,000 processes on the node


@dataclass(frozen=True)
class RunHolder:
    """Who holds a lock. processes: process id -> start time in clock ticks, of the launcher and its ranks."""

    token: str
    host: str
    place: str  # boot and process namespace, in which process ids mean the same; empty without /proc
    started: str
    processes: dict[int, int]

    @classmethod
    def here(cls, processes: Sequence[int] = ()) -> RunHolder:
        """Return this process, and others that belong to its run."""
        pids = (os.getpid(), *processes)
        return cls(uuid.uuid4().hex, platform.node(), _place(), utc_now(), {pid: _start_time(pid) or 0 for pid in pids})

    @classmethod
    def read(cls, path: Path) -> RunHolder | None:
        """Return the holder that a lock file names; None if it names none, or is no file. Raises FileNotFoundError."""
        if not stat.S_ISREG(path.lstat().st_mode):  # a named pipe would be waited for
            return None
        with path.open("rb") as file:
            text = file.read(FIRST_BLOCK)
        try:
            found = parse_json_text(text)
            processes = {int(pid): int(start) for pid, start in found["processes"].items()}
            holder = cls(
                token=str(found["token"]),
                host=str(found["host"]),
                place=str(found["place"]),
                started=str(found["started"]),
                processes=processes,
            )
            return holder if processes else None
        except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether its process ids mean the same in this process."""
        return bool(self.place) and (self.host, self.place) == (platform.node(), _place())

    @property
    def is_alive(self) -> bool:
        """Whether one of its processes exists. Meaningful only where `is_here` is true."""
        return any(_start_time(pid) == start for pid, start in self.processes.items())

    def __str__(self) -> str:
        return f"process {next(iter(self.processes))} on {self.host}, started {self.started}"


@contextlib.contextmanager
def locked_folder(folder: Path, *, processes: Sequence[int] = (), key: str = OUTPUT_DIR) -> Iterator[None]:
    """Hold the lock of `folder`, which is made. Raises UserError (exit code 2) if another run holds it.

    processes: others that write to the folder, as long as one of them exists. key: that names it, for messages. A
    folder that this call made and that is empty afterwards is removed.
    """
    made = _make(folder, key)
    lock = _RunLock(folder / LOCK_FILE, RunHolder.here(processes), made, key)
    try:
        lock.acquire()
    except BaseException:
        _remove_empty(made)
        raise
    with before_leaving(lock.release):
        try:
            yield
        finally:
            lock.release()


def check_not_in_use(folder: Path) -> None:
    """Raise UserError if a run holds the lock of `folder`."""
    _check_regular(folder / LOCK_FILE)
    with contextlib.suppress(OSError):
        holder, age = _look(folder / LOCK_FILE)
        if not _has_ended(holder, age):
            raise _in_use(folder, holder, age)


def _check_regular(path: Path, key: str = OUTPUT_DIR) -> None:
    """Raise UserError for a lock that is a link, a pipe or a folder: no run made it, and it never counts as ended."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(
            f"{key}: the lock {path} is {name_kind(path)}, and not the file that a run makes.",
            hint="Remove it if no run uses the folder, or name another folder.",
        )


class _RunLock:
    def __init__(self, path: Path, holder: RunHolder, made: list[Path], key: str) -> None:
        self._path = path
        self._key = key
        self._holder = holder
        self._made = made
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Create the lock file, or replace one that is left over. Raises UserError."""
        try:
            while not self._create(self._path):
                _check_regular(self._path, self._key)
                _check_regular(self._path.with_name(LOCK_FILE + TAKEOVER), self._key)
                try:
                    holder, age = _look(self._path)
                except FileNotFoundError:  # released in the meantime
                    continue
                if not _has_ended(holder, age):
                    raise _in_use(self._path.parent, holder, age, self._key)
                if self._take_over(holder):
                    who = f" ({holder})" if holder else ""
                    say(f"The run that used {self._path.parent} before was killed{who}.")
                    break
        except OSError as problem:
            raise UserError(
                f"{self._key}: {self._path.parent} cannot be written to ({problem.strerror}).",
                hint="Name a folder that this user may write to.",
            ) from problem
        for left in self._path.parent.glob(f"{LOCK_FILE}.*"):  # by a kill within the milliseconds of an acquisition
            with contextlib.suppress(OSError):  # a folder, which no run makes
                left.unlink(missing_ok=True)
        self._thread.start()

    def release(self) -> None:
        """Remove the lock file if it is still this run's, and the folders that the lock made if they are empty."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()
        _remove_empty(self._made)

    def _create(self, path: Path) -> bool:
        """Write the holder to a new file; return False if there is one already."""
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self._holder)) + "\n")
        except OSError:  # a full disk
            path.unlink()
            raise
        return True

    def _take_over(self, left: RunHolder | None) -> bool:
        """Replace the lock that `left` left over; return False if another run was faster.

        Two runs may find the same left-over lock. The right to replace a lock is a second file, and the lock is read
        again under it, so that neither replaces the other's new one.
        """
        right = self._path.with_name(LOCK_FILE + TAKEOVER)
        mine = self._path.with_name(f"{LOCK_FILE}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # left by a kill during a takeover, which takes milliseconds
            if _look(right)[1] > ENDED_AFTER or not _alive_here(RunHolder.read(right)):
                right.unlink()
        if not self._create(right):
            self._ended.wait(0.05)  # the other run needs milliseconds, and then the lock has a living holder
            return False
        try:
            if RunHolder.read(self._path) != left:
                return False
            mine.unlink(missing_ok=True)
            self._create(mine)
            os.replace(mine, self._path)
            return True
        finally:
            right.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        holder = RunHolder.read(self._path)
        return holder is not None and holder.token == self._holder.token

    def _renew(self) -> None:
        while not self._ended.wait(SIGN_OF_LIFE):
            with contextlib.suppress(OSError):  # the file server may be away for a while
                if RunHolder.read(self._path) == self._holder:
                    os.utime(self._path)
                elif not self._ended.is_set():
                    self._lose()

    def _lose(self) -> None:
        """End all processes of this run: another one owns the folder now."""
        say(
            f"Another run has taken over {self._path.parent}, because this one gave no sign of life for "
            f"{ENDED_AFTER:.0f} seconds; this one ends without saving.",
            last=True,
        )
        for pid in self._holder.processes:
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)


def _make(folder: Path, key: str) -> list[Path]:
    """Make a folder and those above it; return the new ones, lowest first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(
            f"{key}: {folder} cannot be made ({problem.strerror}).", hint="Name a folder that this user may write to."
        ) from problem
    return missing


def _remove_empty(folders: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # one that holds something stays, and those above it
        for folder in folders:
            folder.rmdir()


def _look(path: Path) -> tuple[RunHolder | None, float]:
    """Return (holder, seconds since its last sign of life by the file system's clock). Raises FileNotFoundError."""
    holder = RunHolder.read(path)
    if holder is not None and holder.is_here:
        return holder, 0.0
    clock = path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
    try:
        clock.touch()
        return holder, clock.stat().st_mtime - path.stat().st_mtime
    finally:
        clock.unlink(missing_ok=True)


def _has_ended(holder: RunHolder | None, age: float) -> bool:
    return not holder.is_alive if holder is not None and holder.is_here else age > ENDED_AFTER


def _alive_here(holder: RunHolder | None) -> bool:
    """Whether a holder may still be alive: not if this host knows that it is not."""
    return holder is None or not holder.is_here or holder.is_alive


def _in_use(folder: Path, holder: RunHolder | None, age: float, key: str = OUTPUT_DIR) -> UserError:
    who = str(holder) if holder else "another process that is just starting"
    away = holder is None or not holder.is_here
    seen = f"; its last sign of life was {format_duration(max(age, 0))} ago" if away else ""
    later = f" A run counts as ended after {ENDED_AFTER:.0f} seconds without a sign of life." if away else ""
    return UserError(
        f"{key}: {folder} is in use by a run ({who}{seen}).",
        hint=f"Wait until it has ended, or name another folder.{later}",
    )


def _place() -> str:
    """Return boot and process namespace of this process; empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended or there is no /proc."""
    try:
        # the program's name is in parentheses and may contain some
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])
