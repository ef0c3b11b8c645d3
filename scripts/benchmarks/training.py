"""Runner of the training benchmarks: sides train the cases of a table, and a page compares them.

    scripts/bench packed_rows --corpus FOLDER [--sides with,hf,liger] [--steps 40] [--page docs/benchmarks]
    scripts/bench llama,gemma --corpus FOLDER [--batches 16,32] [--length 4096] [--processes 4]
    scripts/bench published_lora --corpus FOLDER --only lora_llama,lora_qwen --global-batch 32 --budget 330
    scripts/bench dpo_lora --corpus FOLDER --largest      also the largest batch that fits, by doubling
    scripts/bench peers,peers_dpo --corpus FOLDER --site unsloth=FOLDER --site automodel=FOLDER

Each run is a new process. A row is printed when its run ends. Sides whose package is not installed, or that --budget
leaves no time for, are named above the table. With --length the full rows are longer, and the batches have as many
tokens as before. With --processes whole models train under FSDP2 with checkpointing. With --site a peer's process finds
its packages in a folder first: benchmarks/peers/ has their versions.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks import host_time, inputs, pages, processes
from benchmarks.inputs import Inputs
from benchmarks.pages import GIB
from benchmarks.sides.training import TrainingSide, has_site, side_of, sides_of, without_grad_norms
from benchmarks.tables.training import TABLES
from benchmarks.workload import LENGTH, Case, Table
from ligertune.compare.side import SIDE_OF
from ligertune.compare.summary import Point, SideResult, summarise_trials
from ligertune.compare.trial import Trial, TrialOptions
from ligertune.recipe import dump_recipe, load_recipe

# Whole models do not fit without FSDP2 and checkpointing, and float8 of ours needs whole weights.
SEVERAL = {"parallel.strategy": "fsdp", "train.gradient_checkpointing": True}
SEVERAL_BATCHES = (16, 64)
# A side takes about this long before one has run; torch.compile takes as long again.
FIRST_GUESS = 75.0
MAX_BATCH = 512
PARITY = 5  # first losses that are compared with a trainer's
SLOW_SIDES = ("compile", "with-compile", "liger")  # not run by default with --small
SMALL_LENGTHS = {"full rows": 64, "random words": 64, "images": 1024}
SMALL_SETTINGS = {"train.optim": "adamw_torch", "vision.image_max_pixels": 50_176}


@dataclass
class Measured:
    """The runs of a case at one batch size. skipped: sides without a run, and why."""

    case: Case
    batch: int
    sides: list[TrainingSide] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def about(self) -> str:
        return self.case.about.format(batch=self.batch)

    @property
    def point(self) -> Point:
        """Return the summary. Trainers have no gradient norms, so those of other sides are left out, too."""
        trainers = any(has_site(side) for side in self.sides)
        trials = [without_grad_norms(trial) for trial in self.trials] if trainers else self.trials
        return summarise_trials(trials, sides=[side.side for side in self.sides], label=self.about)


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    # one budget for all tables of a call: a machine with a GPU is lent for a fixed time
    deadline = time.perf_counter() + options.budget
    for name in sys.argv[1].split(","):
        table = with_processes(TABLES[name], options)
        found = list(measure(options, table, deadline))
        good &= publish(options, table, found)
    print(f"reports in {options.out}")
    return 0 if good else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser)
    parser.add_argument("--only", help="comma-separated cases of the tables")
    parser.add_argument(
        "--sides", help="comma-separated: with, hf, compile, liger, trainer, ... (default: the table's)"
    )
    parser.add_argument("--steps", type=int, help="measured steps of a run (default: the table's)")
    parser.add_argument("--warmup", type=int, help="steps before them (default: the table's)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="GPUs of a run")
    parser.add_argument("--batches", help="comma-separated rows of a micro-batch")
    parser.add_argument("--length", type=int, help="tokens of a full row")
    parser.add_argument("--global-batch", type=int, help="rows of an optimizer step, where gradients accumulate")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no run starts")
    parser.add_argument("--largest", action="store_true", help="double the batch of each side until memory runs out")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a recipe key of every side")
    parser.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="SIDE=FOLDER",
        help="packages of a peer: unsloth, automodel, trainer, ...",
    )
    options = pages.parse(parser, partial(pages.joined, keys=("about",)))
    options.corpus = options.corpus.resolve()
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-"))).absolute()
    tables = [TABLES[name] for name in sys.argv[1].split(",")]
    # now, and not when the first runs have taken minutes
    known = {case.name for table in tables for case in table.cases}
    unknown = set(options.only.split(",")) - known if options.only else set()
    if unknown:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    try:
        options.sites = read_sites(options.site)
        for table in tables:
            sides_of(side_names(options, table), task_of(table), options.sites)
    except ValueError as error:
        parser.error(str(error))
    return options


def read_sites(given: Sequence[str]) -> dict[str, Path]:
    """Return the folder of each side in --site. Raises ValueError if it is no folder, or the side has no site."""
    sites = {}
    for pair in given:
        name, _, folder = pair.partition("=")
        if not has_site(side_of(name)):
            raise ValueError(f"--site {pair}: {name} runs with the packages of this environment")
        if not folder or not Path(folder).is_dir():
            raise ValueError(f"--site {pair}: there is no folder {folder or name}; write SIDE=FOLDER")
        sites[name] = Path(folder).resolve()
    return sites


def with_processes(table: Table, options: argparse.Namespace) -> Table:
    """Return the table of whole models on several GPUs."""
    if options.processes == 1:
        return table
    # sharded weights leave room for all layers, so nothing is cut
    cases = tuple(replace(case, layers=None, batches=SEVERAL_BATCHES) for case in table.cases)
    caveats = (*(said for said in table.caveats if "layers" not in said), "FSDP2 with activation checkpointing.")
    return replace(
        table,
        page=table.page.replace("whole_steps", "whole_model"),
        title=table.title.removesuffix("'s layers"),
        caveats=caveats,
        cases=cases,
        settings={**table.settings, **SEVERAL},
    )


def task_of(table: Table) -> str:
    return str(table.settings.get("task", "sft"))


def side_names(options: argparse.Namespace, table: Table, case: Case | None = None) -> list[str]:
    """Return the names of --sides that the case has, or all of the case or table."""
    names = (case.sides if case else ()) or table.sides
    if options.sides:
        wanted = options.sides.split(",")
        return [name for name in wanted if name in names] if case and case.sides else wanted
    # torch.compile takes long on a CPU, and liger-kernel's kernels need a GPU
    return [name for name in names if not (options.small and name in SLOW_SIDES)]


def scaled(batches: Sequence[int], length: int, usual: int = LENGTH) -> tuple[int, ...]:
    """Scale batches from rows of `usual` tokens to rows of `length`: as many tokens, and at least one row."""
    return tuple(dict.fromkeys(max(1, batch * usual // length) for batch in batches))


def batches_of(options: argparse.Namespace, case: Case) -> tuple[int, ...]:
    if options.batches:
        return tuple(map(int, options.batches.split(",")))
    if options.small:
        return (min(2, *case.batches),) if min(case.batches) == 1 else (2,)
    return scaled(case.batches, options.length, case.length) if options.length else case.batches


# ---- runs


def measure(options: argparse.Namespace, table: Table, deadline: float) -> Iterator[Measured]:
    """Yield the runs of each case and batch size."""
    chosen = options.only.split(",") if options.only else [case.name for case in table.cases]
    for case in table.cases:
        if case.name in chosen and side_names(options, table, case):
            for batch in batches_of(options, case):
                yield measure_batch(options, table, Measured(case, batch), deadline)


def measure_batch(options: argparse.Namespace, table: Table, found: Measured, deadline: float) -> Measured:
    """Run all sides, in the reverse order in every second repeat. A side without time or package is skipped."""
    recipe = write_recipe(options, table, found.case, found.batch)
    effort = effort_of(options, table)
    found.sides = sides_of(side_names(options, table, found.case), task_of(table), options.sites)
    longest = FIRST_GUESS
    for repeat in range(1, options.repeats + 1):
        # a GPU's clock changes by some percent within seconds: no side has the same place in all repeats
        for side in found.sides if repeat % 2 else found.sides[::-1]:
            expected = longest + (FIRST_GUESS if side.side.change == "compile" else 0)
            reason = None if side.missing is None else f"{side.missing} is not installed"
            if reason is None and time.perf_counter() + expected > deadline:
                reason = f"the {options.budget:.0f} s of --budget were spent"
            if reason:
                found.skipped.append(
                    f"Without a row: {', '.join(filter(None, [side.side.label, found.about]))} ({reason})."
                )
                print(found.skipped[-1], flush=True)
                continue
            start = time.perf_counter()
            folder = folder_of(options, found, side, repeat)
            if table.profiled:
                trial = host_time.measure(side, recipe, repeat, effort, folder)
            else:
                trial = side.measure(recipe, repeat, effort, folder)
            seconds = time.perf_counter() - start
            # a later side takes as long as the longest so far; compilation is counted apart
            longest = seconds if side.side.change != "compile" else longest
            found.trials.append(trial)
            print(words(found.about, side, trial, seconds), flush=True)
    # a side that never ran has no place in the summary, which would call it a failure
    found.sides = [side for side in found.sides if any(trial.side == side.side.name for trial in found.trials)]
    return found


def folder_of(options: argparse.Namespace, found: Measured, side: TrainingSide, repeat: int) -> Path:
    return options.out / f"{found.case.name}-{found.batch}" / f"{side.side.name}-{repeat}"


def effort_of(options: argparse.Namespace, table: Table) -> TrialOptions:
    steps = options.steps or (table.small_steps if options.small else table.steps)
    return TrialOptions(repeats=options.repeats, steps=steps, processes=options.processes, folder=options.out)


def warmup_of(options: argparse.Namespace, table: Table) -> int:
    if options.warmup is not None:
        return options.warmup
    return min(table.warmup, 2) if options.small else table.warmup


def write_recipe(options: argparse.Namespace, table: Table, case: Case, batch: int) -> Path:
    """Write the recipe of a case, which all sides read. Keys of --set come last."""
    settings = settings_of(options, table, case, batch)
    if table.before:
        settings |= {"model.model_name_or_path": train_before(options, table, settings)}
        settings.pop("model.init", None)
    path = inputs.write_recipe(options.out / f"{case.name}-{batch}.yaml", settings)
    path.write_text(dump_recipe(load_recipe(path, overrides=options.set)), encoding="utf-8")
    return path


def settings_of(options: argparse.Namespace, table: Table, case: Case, batch: int) -> dict[str, object]:
    """Return the recipe of a case by dotted keys."""
    source = Inputs(options.corpus, options.out, options.small)
    length = length_of(options, case)
    warmup = warmup_of(options, table)
    steps = effort_of(options, table).steps + warmup
    traced = {}
    if table.profiled:
        # the report's warm-up ends where the profiler's begins
        traced = {"report.warmup_steps": steps, "report.profile_steps": table.profiled}
        steps += table.profiled + host_time.UNTRACED
    step_rows = rows_of_step(options, case, batch)
    # exactly as many rows as a run reads: trainers take them in the order of the file, and none twice
    rows = steps * step_rows * options.processes
    settings = {
        **inputs.model_settings(source, case.model, layers=case.layers, written=table.written),
        "data.datasets": inputs.DATA[case.data](source, length, rows),
        "data.max_length": length,
        "data.val_split": 0.0,
        "data.on_overlength": "truncate",
        "train.per_device_train_batch_size": batch,
        "train.gradient_accumulation_steps": step_rows // batch,
        "train.gradient_checkpointing": False,
        "train.max_steps": steps,
        "train.seed": 42,  # the same weights and order on all sides
        "report.warmup_steps": warmup,
        "logging.logging_steps": 1,  # losses of all steps are compared
        "checkpoint.output_dir": options.out / f"{case.name}-{batch}" / "run",
        "checkpoint.save_strategy": "no",
        "checkpoint.save_model": False,
        "checkpoint.overwrite": True,
        **traced,
        **table.settings,
        **case.settings,
    }
    if case.teacher:
        settings["distill.teacher"] = inputs.write_model(source, case.teacher)
        settings["model.init"] = "random"  # the student of --small differs from its teacher
    if options.small:
        settings |= {key: value for key, value in SMALL_SETTINGS.items() if key in settings}
        settings["train.warmup_steps"] = min(2, settings.get("train.warmup_steps", 0))  # of as few steps as it has
        settings.pop("train.gradient_checkpointing_layers", None)
    return settings


def length_of(options: argparse.Namespace, case: Case) -> int:
    if options.length:
        return options.length
    return min(case.length, SMALL_LENGTHS.get(case.data, LENGTH)) if options.small else case.length


def rows_of_step(options: argparse.Namespace, case: Case, batch: int) -> int:
    """Return the rows of an optimizer step on one process."""
    if case.step_rows is None:
        return batch
    return options.global_batch or (2 * batch if options.small else case.step_rows)


def train_before(options: argparse.Namespace, table: Table, settings: dict[str, object]) -> Path:
    """Train in bfloat16 first, `before` times as many steps as are measured; return the model's folder."""
    run = options.out / "trained"
    more = {"train.learning_rate": 3e-4, "train.max_steps": table.before * effort_of(options, table).steps,
            "checkpoint.output_dir": run, "checkpoint.save_model": True}  # fmt: skip
    recipe = inputs.write_recipe(options.out / "trained.yaml", {**settings, **more})
    with (options.out / "trained.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "ligertune", "train", str(recipe)]
        done = subprocess.run(command, env=processes.environment(), stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"the training before the measured steps failed: see {log.name}")
    return run / "model"


def largest_batches(options: argparse.Namespace, table: Table, found: Measured) -> dict[str, int]:
    """Double the batch of each side that finished until a run fails; return the last that fits."""
    largest = {}
    # one step shows whether a batch fits: AdamW's states exist after the warm-up
    effort = replace(effort_of(options, table), steps=1)
    for side in found.sides:
        batch = 0 if any(trial.failure for trial in found.trials if trial.side == side.side.name) else found.batch
        while batch and 2 * batch <= MAX_BATCH and not options.small:
            more = Measured(found.case, 2 * batch)
            recipe = write_recipe(options, table, found.case, more.batch)
            trial = side.measure(recipe, 1, effort, folder_of(options, more, side, 1))
            print(words(more.about, side, trial, 0.0), flush=True)
            if trial.failure:
                break
            batch = more.batch
        largest[side.side.label] = batch
    return largest


def words(about: str, side: TrainingSide, trial: Trial, seconds: float) -> str:
    """Return one line about a run."""
    place = ", ".join(filter(None, [about, side.side.label]))
    (result,) = summarise_trials([trial], sides=[side.side], label="").sides
    if trial.failure or not result.tokens_per_second:
        return f"{place}: {trial.failure or 'no step was measured'} ({seconds:.0f} s)"
    mfu = f", MFU {result.mfu:.1%}" if result.mfu else ""
    return (f"{place}: {result.tokens_per_second.mean:,.0f} tokens/s{mfu}, peak {result.peak / GIB:.2f} GiB, losses "
            f"{trial.steps[0].loss:.4f} to {trial.steps[-1].loss:.4f} ({seconds:.0f} s)")  # fmt: skip


# ---- page


def publish(options: argparse.Namespace, table: Table, found: list[Measured]) -> bool:
    """Publish the page of a table. Returns whether no side failed, but for memory, and ours have the right losses."""
    rows: list[dict] = []
    left_out: list[str] = []
    remarks: list[str] = []
    good = True
    for measured in found:
        point = measured.point
        left_out += measured.skipped
        rows += rows_of_point(options, table, measured, point)
        left_out += [f"Without a row: {', '.join(filter(None, [side.label, point.label]))} ({reason_of(side)})."
                     for side in point.sides if side.failure]  # fmt: skip
        remarks += remarks_of(measured, point)
        good &= all(is_good(side, point) for side in point.sides)
        if options.largest:
            largest = largest_batches(options, table, measured)
            said = ", ".join(f"{label} {batch or 'none'}" for label, batch in largest.items())
            remarks.append(f"Largest batch that fits, found by doubling {measured.batch} up to {MAX_BATCH}: {said}.")
    if not rows:
        print("\n".join(["nothing was measured", *left_out]))
        return False
    page = table.page
    title = table.title
    if options.length and not options.small:
        page += f"_{options.length}"
        title += f", rows of {options.length:,} tokens"
    rows = with_ratios(rows)
    pages.publish(
        options,
        count=options.processes,
        page=page + "_small" * options.small,
        title=title + " (with --small: a small model)" * options.small,
        intro=f"{table.intro} Sides: {'; '.join(dict.fromkeys(row['side'] for row in rows))}.",
        caveats=[*table.caveats, *shared_caveats(options, table, found)],
        columns=columns_of(table, rows),
        rows=rows,
        left_out=left_out,
        remarks=remarks,
        chart=curves(found[0]) if table.curves else CHART,
    )
    return good


CHART = {
    "kind": "bars",
    "labels": ["side"],
    "group": "about",
    "values": {
        "tokens_per_second": "tokens/s without padding (more is better)",
        "peak_gib": "peak memory per GPU, GiB (less is better)",
    },
}


def is_good(side: SideResult, point: Point) -> bool:
    """Return whether a side finished or ran out of memory, and one of ours has the losses of Hugging Face's side."""
    if side.failure:
        return side.failure.kind == "out of memory"
    # trainers compute other roundings, and other libraries need not have our losses
    compared = side.parity is not None and point.reference == "without" and is_ours(side.name)
    return side.parity.same if compared else True


def reason_of(side: SideResult) -> str:
    """Return why a side has no row; of another tool with the sentence with which it refused."""
    failure = side.failure
    return failure.kind if failure.kind == "out of memory" or is_ours(side.name) else str(failure)


def is_ours(name: str) -> bool:
    return name in SIDE_OF and SIDE_OF[name].ours


def rows_of_point(options: argparse.Namespace, table: Table, measured: Measured, point: Point) -> list[dict]:
    """Return the rows of the sides that finished, and the published one."""
    rows = []
    for side in point.sides:
        if side.tokens_per_second is None:
            continue
        report = next(trial.report for trial in side.trials if trial.report)
        mean = side.tokens_per_second.mean
        reserved = side.peak_memory.get("reserved_steady")  # a CPU reserves nothing
        rows.append({
            "about": point.label, "name": side.name, "side": side.label, "ours": is_ours(side.name),
            "tokens_per_second": side.median_tokens_per_second if table.by_step else mean,
            "mean": mean if table.by_step else None, "standard_error": side.tokens_per_second.standard_error,
            "step_rows": measured.case.step_rows and rows_of_step(options, measured.case, measured.batch),
            "step_ms": 1e3 * side.median_step_seconds, "mfu": side.mfu, "peak_gib": side.peak / GIB,
            "reserved_gib": reserved / GIB if reserved else None, "attention": report["attn_implementation"],
            "losses": [step.loss for step in side.first_run],
            **{key: (report["throughput"] or {}).get(key) for key, *_ in table.extra},
        })  # fmt: skip
    published = measured.case.published
    # a published number is of the whole model, so it is no measure of a small one
    if published and rows and not options.small:
        rows = [{**row, "times_published": row["tokens_per_second"] / published} for row in rows]
        rows.append({"about": point.label, "name": "published", "side": table.published_by, "ours": False,
                     "tokens_per_second": published, "times_published": 1.0})  # fmt: skip
    return rows


def reference_of(rows: list[dict]) -> dict:
    """Return the row that others are compared with: the fastest of Hugging Face's, a peer's, or the first side's."""
    names = [row["name"] for row in rows]
    chosen = next((name for name in ("without", "unsloth", "trainer") if name in names), names[0])
    return max((row for row in rows if row["name"] == chosen), key=lambda row: row["tokens_per_second"])


def with_ratios(rows: list[dict]) -> list[dict]:
    """Return the rows of each setting, the fastest first, with their ratios to the reference at that setting."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["about"], []).append(row)
    if all(len(group) == 1 for group in groups.values()):  # each side has settings of its own
        groups = {"": rows}
    done = []
    compared = reference_of(rows)["name"]
    for group in groups.values():
        others = [row for row in group if row["name"] == compared]
        other = reference_of(others) if others else None  # it has failed at this setting
        for row in sorted(group, key=lambda row: -row["tokens_per_second"]):
            ratios = {"times": row["tokens_per_second"] / other["tokens_per_second"]} if other else {}
            if other and row.get("peak_gib") and other.get("peak_gib"):
                ratios["memory"] = row["peak_gib"] / other["peak_gib"]
            done.append({**row, **ratios})
    return done


def columns_of(table: Table, rows: list[dict]) -> list[list[str]]:
    other = reference_of(rows)["side"]
    # the rows of a profiled table are different workloads of one side
    ratios = [] if table.profiled else [["times", f"times {other}", ".2f"], ["memory", f"memory / {other}'s", ".2f"]]
    return [
        ["about", "what", ""],
        ["step_rows", "rows per step", ""],
        ["side", "side", ""],
        ["tokens_per_second", "tokens/s", ",.0f"],
        ["mean", "mean tokens/s", ",.0f"],
        ["standard_error", "± standard error", ",.0f"],
        *map(list, table.extra),
        ["mfu", "MFU", ".1%"],
        ["step_ms", "median step, ms", ",.1f"],
        ["peak_gib", "peak GiB", ".1f"],
        ["reserved_gib", "reserved GiB", ".1f"],
        *ratios,
        ["times_published", f"times {table.published_by}", ".3f"],
    ]


def shared_caveats(options: argparse.Namespace, table: Table, found: list[Measured]) -> list[str]:
    """Return what holds for every table: effort, attention, lengths of real texts, and keys of --set."""
    said = []
    if not options.small and not table.before:
        said.append("Weights are random. Speed and memory do not depend on them; losses do.")
    runs = "once" if options.repeats == 1 else f"{options.repeats} times"
    noise = " Small differences between sides may be noise." if options.repeats == 1 else ""
    said.append(f"Each side ran {runs}, in new processes: {effort_of(options, table).steps} measured steps after "
                f"{warmup_of(options, table)} of warm-up.{noise}")  # fmt: skip
    if table.by_step:
        said.append("Tokens/s are the median of single steps, without padding. The mean also counts steps in "
                    "which a kernel is compiled for a new size.")  # fmt: skip
    else:
        said.append("Tokens/s are the mean of the measured steps, without padding.")
    reports = {trial.side: trial.report for measured in found for trial in measured.trials if trial.report}
    labels = {side.side.name: side.side.label for measured in found for side in measured.sides}
    attention = ", ".join(f"{labels[name]} `{report['attn_implementation']}`" for name, report in reports.items())
    said.append(f"Attention: {attention}.")
    said += settings_of_peers(found, labels)
    lengths = next((report["lengths"] for report in reports.values() if report.get("lengths")), None)
    if lengths:
        said.append(f"A text has {statistics.median(lengths):,.0f} tokens in the median, "
                    f"{statistics.mean(lengths):,.0f} in the mean, {max(lengths):,} at most.")  # fmt: skip
    if options.set:
        said.append(f"Set for every side: {', '.join(f'`{pair}`' for pair in options.set)}. What is a kernel of "
                    "ligertune's acts on its sides only.")  # fmt: skip
    return said


def settings_of_peers(found: list[Measured], labels: dict[str, str]) -> list[str]:
    """Return a sentence for each setting of another tool, with the cases that it was used in."""
    cases: dict[str, list[str]] = {}
    for measured in found:
        for trial in measured.trials:
            if trial.report and trial.report.get("setting"):
                cases.setdefault(f"{labels[trial.side]}: {trial.report['setting']}", []).append(measured.about)
    return [
        f"{setting} ({'; '.join(dict.fromkeys(about))})." if len(cases) > 1 else f"{setting}."
        for setting, about in cases.items()
    ]


def remarks_of(measured: Measured, point: Point) -> list[str]:
    """Return the differences of losses from the reference, and slow steps."""
    where = f", {point.label}" if point.label else ""
    reference = point.side(point.reference) if point.reference else None
    said = []
    for side in point.sides:
        if side.parity is None or reference is None:
            continue
        # a trainer's later losses belong to weights that bfloat16 has moved apart
        first = PARITY if reference.name not in SIDE_OF else len(side.first_run)
        pairs = list(zip(side.first_run, reference.first_run, strict=False))[:first]
        worst = max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs)
        said.append(f"Largest relative difference of the first {len(pairs)} losses from {reference.label}{where}, "
                    f"{side.label}: {worst:.1e}.")  # fmt: skip
    slow = [f"{side.label} step {step.step} ({step.seconds:.2f} s)" for side in point.sides for step in side.slow_steps]
    return said + ([f"Steps that took over three times the median{where}: {', '.join(slow)}."] if slow else [])


def curves(measured: Measured) -> dict:
    """Return a chart of each side's losses, ligertune's first."""
    point = measured.point
    sides = sorted((side for side in point.sides if not side.failure), key=lambda side: side.name != "with")
    return {"kind": "curves", "curves": {side.label: [step.loss for step in side.first_run] for side in sides}}
