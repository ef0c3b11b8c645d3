"""Run fuzz cases, each in a fork of this process with limits on time and memory, and judge them."""

import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from support.command_line import ROOT, run_here
from support.fuzz.fuzz_cases import CaseMaker, FuzzCase, sets

MAX_SECONDS, MAX_BYTES = 20, 2 << 30  # of processor time, and of memory beyond this process's
MAX_WAIT = 120  # seconds until a case counts as hanging: other processes may use the cores
RECIPE = """\
model: {model_name_or_path: ./model, dtype: float32}
data: {datasets: [{path: data.jsonl}], max_length: 256, packing: true}
train: {max_steps: 4, per_device_train_batch_size: 1, learning_rate: 1.0e-4, optim: adamw_torch, seed: 3}
eval: {eval_strategy: "no"}
checkpoint: {output_dir: runs/one, save_steps: 2, save_model: true}
logging: {logging_steps: 1}
method: {type: full}
"""
Files = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Outcome:
    """What became of a case. fault: an empty string if it ended as it should."""

    case: FuzzCase
    number: int
    code: int
    said: str
    seconds: float
    fault: str

    def __str__(self) -> str:
        command = f"ligertune {' '.join(self.case.arguments)}"
        return f"{self.number}: {self.fault}: {self.case.name}\n    {command}\n    {self.said[-1500:]}"


def prepare_base(folder: Path) -> Path:
    """Make the folder whose copies are changed, with a run that was stopped after step 2. This imports everything."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "WANDB_MODE"):
        os.environ[name] = "offline" if name == "WANDB_MODE" else "1"
    # matplotlib would look for fonts anew in another home, which takes two seconds
    os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
    os.environ.update(TOKENIZERS_PARALLELISM="false", LIGERTUNE_CACHE=str(folder / "cache"), HOME=str(folder / "home"))
    torch.set_num_threads(1)
    base, quickstart = folder / "base", ROOT / "configs" / "quickstart"
    shutil.copytree(quickstart / "stories260K", base / "model")
    rows = (quickstart / "dolly_short.jsonl").read_text().splitlines(keepends=True)[:12]
    (base / "data.jsonl").write_text("".join(rows))
    (base / "r.yaml").write_text(RECIPE)
    lora = {"method.type": "lora", "train.max_steps": 1, "checkpoint.output_dir": "runs/lora"}
    for arguments in (
        ("train", "r.yaml"),
        ("train", "r.yaml", *sets(lora)),
        ("distill", "r.yaml", "--write", "teacher", *sets({"distill.teacher": "./model", "distill.top_k": 4})),
        ("data", "r.yaml"),
        ("generate", "./model", "Hi.", "--max-new-tokens", "1"),
    ):
        done = run_here(*arguments, cwd=base)
        assert done.code == 0, done.err
    (base / "runs" / "lora" / "model").rename(base / "adapter")
    shutil.rmtree(base / "runs" / "lora")
    for name in ("report.json", "report.html", "model", "curves.png"):  # as if it had been killed
        path = base / "runs" / "one" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(base / "runs" / "one" / "checkpoints" / "step-4", ignore_errors=True)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all that is imported
    return base


def fuzz(folder: Path, *, seed: int, numbers: range) -> Iterator[Outcome]:
    """Yield the outcome of each case. Faulty ones leave their folder."""
    maker = CaseMaker(prepare_base(folder), seed)
    for number in numbers:
        place = folder / f"case-{number}"
        case = maker.make(number, place)
        outcome = judge(case, number, place)
        if not outcome.fault:
            shutil.rmtree(place)
        yield outcome


def judge(case: FuzzCase, number: int, folder: Path) -> Outcome:
    """Run a case and say what is wrong with its end."""
    before, answer = files_of(folder), folder.with_suffix(".json")
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = os.fork()
    if not child:
        run_limited(case, folder, answer)
    status, usage = wait_for(child)
    done = json.loads(answer.read_text()) if answer.is_file() else {"code": -1, "said": f"ended by {status}"}
    answer.unlink(missing_ok=True)
    seconds = usage.ru_utime + usage.ru_stime
    errors = [line for line in done["said"].splitlines() if line.startswith("Error:")]
    faults = {
        f"exit code {done['code']}": done["code"] not in (0, 2) and not (done["code"] == 1 and len(errors) == 1),
        "a traceback": "Traceback (most recent call last)" in done["said"],
        f"{seconds:.0f} s": seconds > MAX_SECONDS,
        "too much memory": (usage.ru_maxrss - began) << 10 > MAX_BYTES,
        "files outside": case.outputs is not None and bool(written_outside(before, files_of(folder), case.outputs)),
    }
    fault = ", ".join(name for name, holds in faults.items() if holds)
    return Outcome(case, number, done["code"], done["said"], seconds, fault)


def run_limited(case: FuzzCase, folder: Path, answer: Path) -> None:
    """Run the command in this fork, write what it said, and end."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_BYTES, mapped + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS + 1, MAX_SECONDS + 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        done = run_here(*case.arguments, cwd=folder)
        code, said = done.code, done.err
    except BaseException:
        import traceback

        code, said = 1, traceback.format_exc()
    answer.write_text(json.dumps({"code": code if isinstance(code, int) else 1, "said": said}))
    os._exit(0)


def wait_for(child: int) -> tuple[int, resource.struct_rusage]:
    """Wait for the end of a process, which is killed if it hangs."""
    end = time.monotonic() + MAX_WAIT
    while time.monotonic() < end:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.wait4(child, 0)[1:]


def files_of(folder: Path) -> Files:
    """Return size and time of each file of a folder, and of its parent's entries except other cases."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not path.is_dir():
                found[path.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns)
    return found | {f"../{path.name}": (0, 0) for path in folder.parent.iterdir() if path.suffix != ".json"}


def written_outside(before: Files, after: Files, outputs: tuple[str, ...]) -> list[str]:
    """Return the files that were changed, made or removed, apart from those below `outputs`."""
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return [name for name in changed if name.split("/")[0] not in outputs]


def summary(outcomes: list[Outcome]) -> str:
    """Return the number of cases by kind and exit code."""
    counts = Counter((outcome.case.name.split(":")[0], outcome.code) for outcome in outcomes)
    lines = [f"{kind:<20} exit code {code:>3}  {count:>5}" for (kind, code), count in sorted(counts.items())]
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    faulty = sum(bool(outcome.fault) for outcome in outcomes)
    lines.append(f"slowest: {slowest.seconds:.1f} s ({slowest.case.name})")
    return "\n".join([*lines, f"{faulty} of {len(outcomes)} faulty"])
