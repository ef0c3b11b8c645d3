"""Sides of the training benchmarks by the trainers of transformers and TRL, on ligertune's weights, examples and order.

`python -m benchmarks.sides.trainers SIDE RECIPE` trains in this process and prints one point.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks import processes
from benchmarks.sides.batches import joined_rows, padded, step_losses
from ligertune.attention.choice import installed
from ligertune.data.batching.order import DataOrder
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Example
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.feature_spec import feature_of
from ligertune.recipe import load_recipe
from ligertune.training.metrics.meter import resident_peak_bytes
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job

SCORE_TASKS = ("classification", "reward")
Made = tuple[Any, str]  # a trainer, and what a reader must know about its settings


def resolve(recipe: str) -> Job:
    return plan_for(load_recipe(Path(recipe)))


def main(
    side: str,
    recipe: str,
    measure: Callable[[Job, str], dict[str, Any]] | None = None,
    resolve: Callable[[str], Job] = resolve,
) -> int:
    """Train a recipe with a side, and print steps and a report, or the reason of a failure."""
    job = resolve(recipe)
    try:
        point = (measure or measure_trainer)(job, side)
    except Exception as error:
        if not processes.is_out_of_memory(error):
            raise
        point = {"failed": "out of memory"}
    processes.say(point)
    return 0


def measure_trainer(job: Job, side: str) -> dict[str, Any]:
    """Train with the trainer of the recipe's task. side: trainer, trainer_liger, trainer_patched or trainer_offload."""
    flash = installed("flash-attn") and torch.cuda.is_available()
    attention = "flash_attention_2" if flash else "sdpa"
    model = model_of(job, attention, patched=side == "trainer_patched")
    job.tokenizer.tokenizer.pad_token_id = job.tokenizer.pad_token_id
    more = {"use_liger_kernel": side == "trainer_liger"}
    if side == "trainer_offload":
        more["activation_offloading"] = True
    setup = Setup(job, model, attention, more)
    trainer, setting = MAKERS[job.plan.build.task](setup)
    return train(setup, trainer, setting)


def train(setup: Setup, trainer: Any, setting: str) -> dict[str, Any]:
    """Train, and return steps and report in the form of a trial of `ligertune compare`."""
    job = setup.job
    times = StepTimes(job.plan.measurement.warmup_steps)
    trainer.add_callback(times)
    trainer.train()
    return result(
        job,
        losses=step_losses(trainer.losses, job.plan.batching.accumulation),
        seconds=times.seconds(),
        peak=peak_bytes(),
        attention=setup.attention,
        setting=setting,
    )


def peak_bytes() -> int:
    """Return the peak memory since the last reset; without a GPU that of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak_bytes()


def result(
    job: Job, *, losses: list[float], seconds: list[float], peak: int, attention: str, setting: str
) -> dict[str, Any]:
    """Return steps and report in the form of a trial. losses, seconds: one for each step. peak: bytes."""
    warmup = job.plan.measurement.warmup_steps
    examples = examples_of_steps(job)
    tokens = [sum(len(example.input_ids) for example in step) for step in examples]
    steps = [{"step": i + 1, "loss": loss, "tokens": tokens[i], "seconds": seconds[i]} for i, loss in enumerate(losses)]
    report = {
        "throughput": {"tokens_per_second": sum(tokens[warmup:]) / sum(seconds[warmup:]), "mfu": None},
        "peak_memory": {"allocated_run": peak},
        # a summary of trials reads these; a trainer has none of our kernels, and no float8
        "kernels": [],
        "kernels_backend": "",
        "padding_free": False,
        "fp8": False,
        "dtype": job.plan.precision.weights,
        "batch": "",
        "attn_implementation": attention,
        "setting": setting,
        "lengths": [len(part.input_ids) for step in examples for example in step for part in example.documents()],
    }
    return {"steps": steps, "report": report}


def version_of(package: str) -> str | None:
    """Return the version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def rows_of_steps(job: Job) -> list[list[list[Example]]]:
    """Return the rows of each step, in ligertune's order. A row is one example, or those that are packed together."""
    plan = job.plan
    examples = job.data.train
    steps = plan.schedule.total_steps
    order = DataOrder(
        examples.lengths,
        total_rows=steps * plan.batching.global_batch_size,
        seed=plan.build.seed,
        batching=plan.batching,
        packs=pack(examples.lengths, plan.rows.length) if plan.rows.packed else None,
    )
    return [[[examples[int(i)] for i in row] for row in order.step(step)] for step in range(steps)]


def examples_of_steps(job: Job) -> list[list[Example]]:
    """Return the examples of each step, in ligertune's order."""
    return [[example for row in step for example in row] for step in rows_of_steps(job)]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_of(job: Job, attention: str, *, patched: bool) -> PreTrainedModel:
    """Return the model that ligertune would train, without its kernels unless `patched`."""
    build = job.plan.build
    spec = build.model.model_copy(update={"attn_implementation": attention})
    config = read_config(spec)
    if build.task in SCORE_TASKS:
        feature_of(build.task).prepare_config(config, build)
    dtype = getattr(torch, job.plan.precision.weights)
    model = build_model(spec, config, dtype=dtype, device=device(), seed=build.seed)
    if build.task in SCORE_TASKS:
        model.config.pad_token_id = job.tokenizer.pad_token_id
    if patched:
        patch(model, loss="torch")  # these trainers compute their losses themselves
    return apply_method(model, build.method, seed=build.seed)


@dataclass(frozen=True)
class Setup:
    """What a trainer is made of. more: arguments of the side."""

    job: Job
    model: PreTrainedModel
    attention: str
    more: dict[str, Any]

    @property
    def tokenizer(self) -> Any:
        return self.job.tokenizer.tokenizer


class StepTimes(TrainerCallback):
    """Times between the ends of steps, with the device synchronised; peak memory after the warm-up."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.ends: list[float] = []

    def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
        self._mark()

    def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
        self._mark()

    def _mark(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.ends) == self.warmup:
                torch.cuda.reset_peak_memory_stats()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return np.diff(self.ends).tolist()


def with_losses(trainer: type) -> type:
    """Return a subclass that keeps the losses of its steps: some trainers log them rounded."""

    class WithLosses(trainer):
        def training_step(self, *arguments: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **kwargs)
            self.losses = [*getattr(self, "losses", []), loss.detach()]
            return loss

    return WithLosses


def arguments_of(job: Job) -> dict[str, Any]:
    """Return the arguments that all trainers share."""
    plan = job.plan
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(plan.output_dir / "trl"), "max_steps": plan.schedule.total_steps,
        "per_device_train_batch_size": plan.batching.micro_batch_size, "learning_rate": plan.schedule.learning_rate,
        "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "weight_decay": 0.0,
        "max_grad_norm": plan.optimizer.max_grad_norm, "gradient_accumulation_steps": plan.batching.accumulation,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "use_cpu": not on_gpu, "bf16": on_gpu, "disable_tqdm": True,
        "gradient_checkpointing": bool(plan.build.execution.gradient_checkpointing),
    }  # fmt: skip


# ---- one function for each task


def fine_tuning(setup: Setup) -> Made:
    """Return transformers' Trainer on ligertune's rows, in its order."""
    rows = [row for step in rows_of_steps(setup.job) for row in step]
    options = {**arguments_of(setup.job), **setup.more, "remove_unused_columns": False}
    trainer = with_losses(Trainer)(
        setup.model, TrainingArguments(**options), data_collator=joined_rows, train_dataset=rows
    )
    packed = "the same packed rows, joined to one, with `packed_seq_lengths`"
    return trainer, packed if setup.job.plan.rows.packed else ""


def preference(setup: Setup) -> Made:
    """Return a DPOTrainer on the pairs of the recipe's file, in ligertune's order."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    job = setup.job
    lines = Path(job.plan.data_options.datasets[0].path).read_text(encoding="utf-8").splitlines()
    places = [int(example.source.split(":")[-1]) - 1 for step in examples_of_steps(job) for example in step]
    rows = Dataset.from_list([json.loads(lines[place]) for place in places])
    given = {**arguments_of(job), **setup.more, "padding_free": False, "max_length": job.plan.data_options.max_length}
    given["beta"] = job.plan.build.section(PreferenceSpec).beta
    adapter = job.plan.build.method.type == "lora"

    def trainer(precompute: bool) -> Any:
        config = DPOConfig(precompute_ref_log_probs=precompute, **given)
        reference = None if precompute or adapter else model_of(job, setup.attention, patched=False)
        return with_losses(DPOTrainer)(
            setup.model, ref_model=reference, args=config, train_dataset=rows, processing_class=setup.tokenizer
        )

    try:
        return trainer(True), ""
    except ValueError as error:  # liger-kernel's loss may not read precomputed log-probabilities
        if "precompute" not in str(error):
            raise
    kind = "the model with its adapter switched off" if adapter else "a second model in memory"
    return trainer(False), f"the reference is {kind}, because this loss reads no log-probabilities"


def distillation(setup: Setup) -> Made:
    """Return a GKDTrainer on the labels of the data (lmbda 0), fed with ligertune's examples."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    job = setup.job
    spec = job.plan.build.section(DistillSpec)
    dtype = getattr(torch, job.plan.precision.weights)
    teacher = AutoModelForCausalLM.from_pretrained(spec.teacher, dtype=dtype, attn_implementation=setup.attention)
    config = GKDConfig(
        **arguments_of(job), **setup.more, max_length=job.plan.data_options.max_length, lmbda=0.0, beta=spec.beta,
        remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    queue = iter(examples_of_steps(job))
    pad = job.tokenizer.pad_token_id
    trainer = with_losses(GKDTrainer)(
        model=setup.model,
        teacher_model=teacher.to(device()),
        args=config,
        data_collator=lambda rows: padded(next(queue), pad),
        train_dataset=Dataset.from_list([{"input_ids": [1]}] * len(job.data.train)),
        processing_class=setup.tokenizer,
    )
    return trainer, ""


def classification(setup: Setup) -> Made:
    """Return transformers' Trainer on ligertune's examples, in its order."""
    from datasets import Dataset

    rows = [
        {"input_ids": example.input_ids.tolist(), "labels": int(example.targets[0])}
        for step in examples_of_steps(setup.job)
        for example in step
    ]
    trainer = with_losses(Trainer)(
        setup.model,
        TrainingArguments(**arguments_of(setup.job), **setup.more),
        data_collator=DataCollatorWithPadding(setup.tokenizer),
        train_dataset=Dataset.from_list(rows),
        processing_class=setup.tokenizer,
    )
    return trainer, ""


def rewards(setup: Setup) -> Made:
    """Return TRL's RewardTrainer on ligertune's examples, in its order."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    job = setup.job
    pairs = [example.documents() for step in examples_of_steps(job) for example in step]
    rows = [
        {"chosen_ids": chosen.input_ids.tolist(), "rejected_ids": rejected.input_ids.tolist()}
        for chosen, rejected in pairs
    ]
    limit = job.plan.data_options.max_length
    trainer = with_losses(RewardTrainer)(
        model=setup.model,
        args=RewardConfig(**arguments_of(job), **setup.more, max_length=limit),
        train_dataset=Dataset.from_list(rows),
        processing_class=setup.tokenizer,
    )
    return trainer, ""


# task of a recipe -> what makes its trainer
MAKERS: dict[str, Callable[[Setup], Made]] = {
    "dpo": preference,
    "distill": distillation,
    "classification": classification,
    "reward": rewards,
}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
