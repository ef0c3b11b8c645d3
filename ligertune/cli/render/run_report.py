"""Output of a run: plan, predicted memory and what fits, final report, and tables of what a feature measured."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.cli.render.console import columns, sentence, table, text
from ligertune.errors import format_bytes, format_count, format_duration, plural
from ligertune.files.storage import checkpoint_to_resume
from ligertune.recipe.plain_yaml import dump

if TYPE_CHECKING:
    from ligertune.planning.feature_spec import ResultTable
    from ligertune.planning.memory.fit import Fit, LongContext
    from ligertune.planning.plan import KernelLine, Plan, TeacherPlan
    from ligertune.report import Report, Throughput

# StepPhase.name -> words
PHASES = {
    "forward": "in the forward",
    "frozen model": "in the forward of the frozen model",
    "loss": "in the loss",
    "last norm": "in the backward of the last norm",
    "backward": "at the beginning of the backward",
    "run again": "in the backward, when the first checkpointed layer is recomputed",
    "first layer": "in the backward of the first layer",
    "gradients": "at the end of the backward",
    "step": "in the optimizer step",
    "loading": "before the first step, while the initial adapters are computed",
}


def show_plan(plan: Plan, *, price: float | None = None) -> None:
    """Print the plan, before anything is trained. price: of a GPU for an hour, for the cost of the run."""
    from ligertune.planning.feature_spec import feature_of

    batching = plan.batching
    schedule = plan.schedule
    data = plan.data
    place = "in host memory for each device" if plan.parallel.cpu_offload else "on each device"
    groups = plural(batching.row_ranks, "process", "processes")
    if batching.cp_size > 1:
        groups = f"{plural(batching.row_ranks, 'group')} of {batching.cp_size} processes"
    warmup = f" ({schedule.warmup_steps} of them warm-up)" if schedule.warmup_steps else ""
    rows = [
        ("model", f"{plan.model_family}, {format_count(plan.n_parameters)} parameters, {_active(plan.n_active)}"
                  f"{format_count(plan.n_trainable)} trained"),
        ("device", f"{plan.machine.name} ({plan.machine.arch}) x {batching.world_size}, "
                   f"{_with_reason(plan.strategy, plan.strategy_why)}"),
        ("dtype", "float16 (mixed precision: float32 weights, scaled loss)" if plan.precision.autocast == "fp16"
                  else plan.precision.weights),
        ("attention", _with_reason(plan.attn_implementation, plan.attn_why)),
        ("kernels", _kernels(plan.kernels, plan.kernels_backend)),
        ("data", _dataset(plan)),
        ("dropped rows", ", ".join(f"{count} {reason}" for reason, count in data.dropped.items()) or "none"),
        ("batch", f"{batching.micro_batch_size} per device x {batching.accumulation} accumulated x "
                  f"{groups} = {_batch(plan)}"),
        ("steps", f"{schedule.total_steps}{warmup}, {schedule.type}, learning rate {schedule.learning_rate:g}"),
        ("states", f"{format_bytes(plan.bytes.total)} {place} for weights, gradients and {plan.optimizer.name}"),
        ("peak memory", _predicted(plan)),
        *_time(plan, price),
        ("output", str(plan.output_dir)),
    ]  # fmt: skip
    if plan.checkpoint.resume_from_checkpoint != "never":
        rows.append(("resume", _resume(plan)))
    if data.eval_examples:
        # after the row of the training data
        before = ", also before training" if plan.evaluation.eval_on_start else ""
        rows.insert(6, ("evaluation", plural(data.eval_examples, plan.rows.example_noun) + before))
    if plan.teacher is not None:
        rows.insert(1, ("teacher", _teacher(plan.teacher)))
    rows[1:1] = feature_of(plan.build.task).plan_rows(plan)
    table("Plan", rows)
    for line in plan.kernels:
        if line.left:
            sentence(f"not replaced: {line.left} x {line.kernel}: {line.note}", indent="  ")
    for note in plan.notes:
        sentence(f"note: {note}", indent="  ")


def _active(n_active: int | None) -> str:
    """Return the parameters that a token uses, as words, for a mixture of experts."""
    return "" if n_active is None else f"{format_count(n_active)} active, "


def _teacher(teacher: TeacherPlan) -> str:
    shape = teacher.shape
    host = f", {format_bytes(shape.in_host_memory)} in host memory" if shape.in_host_memory else ""
    weights = f"{format_bytes(shape.weights)} on each device{host}"
    return f"{teacher.name}, {format_count(teacher.n_parameters)} parameters, {teacher.dtype}, {weights}"


def _with_reason(choice: str, why: str) -> str:
    return f"{choice} ({why})" if why else choice


def _predicted(plan: Plan) -> str:
    if plan.peak is None:
        # imported here: `ligertune generate` and others print without loading the planner
        from ligertune.planning.feature_spec import feature_of

        return f"not predicted: {feature_of(plan.build.task).why_no_memory}"
    total = format_bytes(plan.peak.total)
    available = format_bytes(plan.machine.memory_bytes)
    if plan.machine.vendor == "cpu":
        return f"{total} of tensors predicted, of {available} of host memory; Python and torch themselves take more"
    return f"{total} predicted of {available} on each device"


def _time(plan: Plan, price: float | None) -> list[tuple[str, str]]:
    """Return the predicted time and cost, what was chosen in place of `auto`, and the next best settings."""
    rows = []
    if plan.time is not None:
        seconds = plan.time.total * plan.schedule.total_steps
        cost = ""
        if price is not None:
            cost = f", {seconds / 3600 * plan.batching.world_size * price:,.2f} at {price:g} per GPU and hour"
        where = "" if plan.time.measured else f", from rates of {plan.time.rates}"
        words = f"{plan.time.total:.3g} s a step, {format_duration(seconds)} for all steps{cost}"
        rows.append(("time", f"{words}, predicted to about {100 * plan.time.error:.0f} %{where}"))
    return [*rows, *plan.choice.items()]


def _resume(plan: Plan) -> str:
    """Return where a resumed run continues. Its files are checked after the model is loaded, which may take minutes."""
    found = checkpoint_to_resume(plan.output_dir, plan.checkpoint.resume_from_checkpoint)
    if found is None:
        return f"{plan.output_dir} holds no checkpoint: starts at step 0"
    folder, step = found
    total = plan.schedule.total_steps
    return f"from step {step} ({folder}); {max(0, total - step)} of {plural(total, 'step')} remain"


def _dataset(plan: Plan) -> str:
    data = plan.data
    if plan.rows.streamed:
        return f"streamed during training, template {data.template}"
    examples = plural(data.examples, plan.rows.example_noun)
    share = 100 * data.trained_tokens / max(1, data.tokens)
    return f"{examples}, {data.tokens:,} tokens, {share:.1f} % trained, template {data.template}"


def _batch(plan: Plan) -> str:
    """Return the global batch size, what it counts, and how rows are made."""
    rows = plan.rows
    size = plan.batching.global_batch_size
    if not rows.packed:
        words = [plural(size, rows.example_noun) + " per step"]
        words += ["grouped by length"] if rows.kind == "grouped" else []
        words += ["padding-free"] if rows.padding_free else []
    else:
        words = [f"{plural(size, 'row')} of {rows.length} tokens per step"]
        if rows.fill is not None:  # the rows of a stream are not counted
            words += [f"{plural(rows.count, 'row')} per epoch", f"{100 * rows.fill:.2f} % filled"]
    return ", ".join([*words, "streamed"] if rows.streamed else words)


# ---- predicted memory, and what fits


def show_memory(plan: Plan, fits: Iterable[Fit] | None) -> None:
    """Print the predicted peak memory by kind, and the largest batch and row that fit."""
    if plan.peak is not None:
        text()
        kinds = {"working": "temporary", "frozen_model": "frozen model"}
        parts = plan.peak.parts().items()
        rows = [(kinds.get(kind, kind), format_bytes(n_bytes)) for kind, n_bytes in parts if n_bytes]
        place = "tensors in each process" if plan.machine.vendor == "cpu" else "each device"
        table(f"Peak memory of {place}, reached {PHASES[plan.peak.phase.name]}", rows)
        sentence(f"The largest micro-batch of the run has {_micro_batch(plan)}.")
    for fit in fits or ():
        text("\n" + "\n".join(_fit_lines(plan, fit)))


def _micro_batch(plan: Plan) -> str:
    """Return the token slots of the largest micro-batch, and its labels where the data order is known."""
    batch = plan.largest_batch
    rows = f"{plural(batch.rows, 'row')} of " if batch.rows > 1 else ""
    labels = "" if batch.labels is None else f", and none more than {plural(batch.labels, 'label')}"
    return f"{rows}{batch.row_length:,} tokens{labels}"


def show_contexts(plan: Plan, found: Iterable[LongContext]) -> None:
    """Print the longest row of each way to save memory, and the lines of the recipe for the longest."""
    found = [one for one in found if one.tokens]
    where = format_bytes(plan.machine.memory_bytes)
    if not found:
        sentence(f"\nNot even a row of a few hundred tokens fits in {where}.")
        return
    text()
    table(f"Longest row in {where}", [_context_row(one.lines["train"], one) for one in found])
    longest = max(found, key=lambda one: one.tokens)
    text(f"\nFor {longest.tokens:,} tokens, write in the recipe:\n" + dump(longest.lines).rstrip())
    if plan.context is not None and longest.tokens > plan.context:
        sentence(f"The model's own context is {plan.context:,} tokens (max_position_embeddings in its config.json).")


def _context_row(settings: dict[str, Any], found: LongContext) -> tuple[str, str]:
    how = "offload" if settings["gradient_checkpointing"] == "offload" else "checkpointing"
    name = f"{how}, tiled_mlp" if settings["tiled_mlp"] else how
    host = f" and {format_bytes(found.host)} of host memory" if found.host else ""
    return name, f"{found.tokens:,} tokens, in {format_bytes(found.peak)}{host}"


def _fit_lines(plan: Plan, fit: Fit) -> Iterable[str]:
    """Yield what fits in the device's memory, and the lines of the recipe that use it."""
    how = f"{'with' if fit.checkpointing else 'without'} checkpointing"
    where = f"in {format_bytes(plan.machine.memory_bytes)}"
    length = f"{plan.row_length:,} tokens"
    if not fit.micro_batch_size:
        yield f"Not even one row of {length} fits {where} {how}."
    else:
        fits = "fits" if fit.micro_batch_size == 1 else "fit"
        yield f"{plural(fit.micro_batch_size, 'row')} of {length} {fits} {where} {how}. Write in the recipe:"
        yield dump(fit.many_rows).rstrip()
    if fit.row_length != plan.sequence_length and fit.row_length:
        whole = " (the model's context)" if fit.row_length == plan.context else ""
        one = "row of" if plan.rows.documents == 1 else f"pair of {plan.rows.documents} x"
        yield f"One {one} {fit.row_length:,} tokens{whole} fits {how}. Write in the recipe:"
        yield dump(fit.long_row).rstrip()


# ---- the report


def _evaluation_loss(report: Report) -> str:
    """Return the evaluation losses before and after training, which are of the same rows, and the last measures."""
    before = report.eval_loss_before_training
    after = report.eval_loss
    words = [f"{before:.4f} before training"] if before is not None else []
    if after is not None:
        words.append(f"{after:.4f} after" if words else f"{after:.4f}")
    for name, value in report.eval_measures.items():
        words.append(f"{name} not finite" if value is None else f"{name} {value:.4f}")
    return ", ".join(words)


def _training_loss(report: Report) -> str:
    """Return the losses of the first and the last logged steps, and that they are of different rows."""
    if report.loss_first is None:
        return "none logged"
    if report.loss_first == report.loss_last:  # of one line: two have different rows
        return f"{report.loss_last:.4f} (logged once: the mean over the steps)"
    return f"{report.loss_first:.4f} -> {report.loss_last:.4f} (first and last logged steps, on different rows)"


def show_report(report: Report) -> None:
    """Print the report of a finished or interrupted run."""
    from ligertune.planning.feature_spec import feature_of
    from ligertune.recipe.feature import feature_parts

    done = report.status == "completed"
    stopped_by = f" by {report.stopped_by}" if report.stopped_by else ""
    resumed = f", resumed at step {report.resumed_from}" if report.resumed_from else ""
    rows = [("status", report.status + stopped_by), ("steps", f"{report.steps} of {report.total_steps}{resumed}")]
    if evaluation := _evaluation_loss(report):
        rows.append(("evaluation loss", evaluation))
    rows.append(("training loss", _training_loss(report)))
    if report.seconds_to_first_step:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds_to_first_step.items())
        rows.append(("first step after", f"{sum(report.seconds_to_first_step.values()):.1f} s: {parts}"))
    rows += _throughput(report.throughput) if report.throughput else []
    rows += [
        ("peak memory", _peak_memory(report)),
        ("kernels applied", _kernels(report.kernels, report.kernels_backend)),
        *_losses(report.losses),
        *_experts(report.experts),
        ("device", f"{report.device} x {report.world_size}, {report.strategy}, {report.dtype}"),
        ("time", format_duration(report.seconds)),
        ("model", report.model_path or f"not written: {'save_model is false' if done else 'the run is not finished'}"),
    ]
    of_features = (name for part in feature_parts() for name in part.run_files if Path(name).suffix)
    pages = ("report.html", "report.json", "curves.png", *of_features)
    written = [str(path) for name in pages if (path := Path(report.output_dir) / name).exists()]
    text()
    table("Report", [*rows, ("written", ", ".join(written))])
    if report.measured is not None:
        show_tables(feature_of(report.task).result_tables(report.measured))


def _throughput(speed: Throughput) -> list[tuple[str, str]]:
    steps = plural(speed.steps, "step")
    excluded = speed.warmup_steps_excluded
    warmup = f"without the first {excluded}" if excluded else "warm-up included"
    rows = [
        ("tokens/s", f"{speed.tokens_per_second:,.0f} real ({speed.trained_tokens_per_second:,.0f} trained), "
                     f"{speed.padded_tokens_per_second:,.0f} with padding ({100 * speed.padding_share:.1f} % padding); "
                     f"over {steps}, {warmup}"),
    ]  # fmt: skip
    unknown = "not computed: no peak rate is known for this device and dtype"
    mfu = unknown if speed.mfu is None else f"{100 * speed.mfu:.1f} %"
    if speed.images_per_second is not None:
        images = f"{speed.images_per_second:,.1f} ({speed.image_tokens_per_second:,.0f} of the tokens/s)"
        rows.append(("images/s", images))
        mfu = "not measured for vision-language models"
    predicted = speed.predicted_step_seconds
    words = "" if predicted is None else f", {predicted:.3g} s predicted"
    return [*rows, ("time of a step", f"{speed.step_seconds:.3g} s{words}"), ("MFU", mfu)]


def show_tables(tables: Iterable[ResultTable]) -> None:
    """Print the tables of what a feature measured."""
    for number, one in enumerate(tables):
        if number == 0:
            text()
        if one.header:
            columns(one.title, list(one.header), one.rows)
        else:
            table(one.title, one.rows)


def next_step(report: Report, arguments: Sequence[str], *, launched: bool) -> None:
    """Print the command to type after a run. arguments: of this command; launched: by torchrun, srun or another."""
    from ligertune.planning.feature_spec import feature_of

    if report.model_path:
        folder = Path(report.model_path)
        text(f"\n{feature_of(report.task).next_step(folder, command())}")
    elif report.status == "interrupted":
        again = shlex.join(resumed(arguments))
        text(f"\nContinue it:  {'(with the same launcher) ' if launched else ''}{command()} {again}")


def resumed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the command that continues a run: the same, with --resume and without --overwrite."""
    kept = [argument for argument in arguments if argument != "--overwrite"]
    resumes = any(argument.partition("=")[0] == "--resume" for argument in kept)
    return kept if resumes else [*kept, "--resume"]


def command() -> str:
    """Return how to call this ligertune from the user's shell: its environment may not be on the PATH."""
    # another environment's ligertune may come first on the PATH
    found = shutil.which("ligertune")
    own = Path(sys.executable).with_name("ligertune")
    if found and Path(found).parent == own.parent:
        return "ligertune"
    here = Path.cwd()
    if own.exists():
        return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))
    return f"{shlex.quote(sys.executable)} -m ligertune"


def _kernels(lines: Iterable[KernelLine], backend: str) -> str:
    """Return the applied kernels with their numbers of modules, and what they run on."""
    applied = [f"{line.kernel} x {line.applied}" for line in lines if line.applied]
    how = "Triton" if backend == "triton" else "PyTorch reference"
    return f"{', '.join(applied)} ({how})" if applied else "none"


def _losses(counts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how the losses were computed, if any was counted. Replays of CUDA graphs are not."""
    fused = counts["fused"]
    from_logits = sum(counts["materialised"].values())
    elsewhere = counts["elsewhere"]
    if not from_logits + elsewhere:
        return [("losses", "in the output head, without logits")] if fused else []
    numbers = {"in the output head, without logits": fused, "from logits": from_logits, "elsewhere": elsewhere}
    return [("losses", ", ".join(f"{number:,} {how}" for how, number in numbers.items() if number))]


def _experts(load: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the load of a mixture's experts: the largest over the mean, and how many were not used."""
    if load is None:
        return []
    layers = sorted(load["layers"], key=lambda layer: layer["imbalance"])
    median = layers[len(layers) // 2]
    worst = layers[-1]
    unused = sum(layer["unused"] for layer in layers)
    total = sum(layer["experts"] for layer in layers)
    auxiliary = ", ".join(f"{name} {value:g}" for name, value in load["auxiliary_loss"].items()) or "no router loss"
    words = f"largest load {median['imbalance']:.2f} times the mean, {worst['imbalance']:.2f} in {worst['layer']}"
    return [("experts", f"{words}; {unused} of {total} unused; no token dropped; {auxiliary}")]


def _peak_memory(report: Report) -> str:
    peak = report.peak_memory
    if peak["kind"] == "resident":  # on a CPU torch does not count allocations
        return f"{format_bytes(peak['allocated_run'])} of host memory (the whole process, with Python and torch)"
    share = report.peak_over_predicted
    compared = "" if share is None else f", {share:.1%} of the predicted peak"
    return (
        f"{format_bytes(peak['allocated_steady'])} allocated, {format_bytes(peak['reserved_steady'])} reserved after "
        f"the warm-up; {format_bytes(peak['allocated_run'])} allocated over the whole run{compared}"
    )
