"""FeatureSpec: what a feature decides, builds, trains and reports, as one value that its folder registers.

Code outside `features/` asks the spec of the run's task and knows no task by name.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.files.storage import PROMPT_FILE, read_object
from ligertune.recipe.feature import TaskOptions, package_of_task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ligertune.any_types import AnyModule
    from ligertune.files.base_model import StoredAs
    from ligertune.hardware import Machine
    from ligertune.planning.memory.model_shape import FrozenModelShape, ModelShape
    from ligertune.planning.options import BuildOptions, KernelOptions, RunOptions
    from ligertune.planning.plan import KernelLine, Plan, TeacherPlan
    from ligertune.planning.precision import Precision
    from ligertune.recipe.section import Section

NO_LAYERS = "this model's layers are not understood"


@dataclass(frozen=True)
class ResultTable:
    """A table of a feature's report. header: names of the columns; without it, rows are a name and a value."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()


@dataclass(frozen=True)
class MeasureChart:
    """A chart of run pages: what a task measures in training and evaluation, by its name in metrics.jsonl."""

    title: str
    unit: str  # of the vertical axis
    measure: str


def _generate(folder: Path, command: str) -> str:
    run = shlex.quote(str(folder.parent))
    prompt = read_object(folder / PROMPT_FILE) or {}
    if prompt.get("prompt_template") == "raw":  # texts are continued
        return f"Generate from it:  {command} generate {run} 'The first words of a text'"
    return f"Generate from it:  {command} generate {run} 'Give three tips for staying healthy.'"


@dataclass(frozen=True)
class FeatureSpec:
    """One feature. Each field is a value or a function; the defaults are those of supervised fine-tuning.

    Functions without a description of their arguments get the run's plan, its options (`BuildOptions`), or its model.
    """

    # Return the task of a plan, for a model that DDP or FSDP have not wrapped yet.
    task: Callable[[Plan, nn.Module], Any]

    # ---- data
    # Return the sections that the prepared data complete, by name: (options, prepared data).
    resolve: Callable[[TaskOptions, Any], Mapping[str, Section]] = lambda options, data: {}
    # Check the prepared data and return notes: (options, prepared data, vocabulary size).
    check_data: Callable[[BuildOptions, Any, int], tuple[str, ...]] = lambda options, data, vocab_size: ()

    # ---- planning
    # Check the finished plan with its data and return notes: (plan, sizes of the model, prepared data).
    check_plan: Callable[[Plan, ModelShape, Any], tuple[str, ...]] = lambda plan, shape, data: ()
    loss_kernel: str = "linear_cross_entropy"  # computes the loss in the output head; empty: none does
    # A forward without gradients costs about as much as a step, because most of a step has no backward either.
    forward_only: bool = False
    # Return the rate of parameters that the feature adds, relative to train.learning_rate.
    added_lr_multiplier: Callable[[TaskOptions], float] = lambda options: 1.0
    # Whether train.method changes what trains: an adapter would train less.
    uses_method: Callable[[BuildOptions], bool] = lambda options: True
    # Return the rows whose logits are made at a time although a kernel is planned; 0: none are.
    loss_chunk_rows: Callable[[TaskOptions], int] = lambda options: 0
    # Plan a second, frozen model: (run options, config, tokenizer, machine, precision).
    frozen_model: Callable[
        [RunOptions, PreTrainedConfig, PreTrainedTokenizerBase, Machine, Precision], TeacherPlan | None
    ] = lambda *inputs: None
    # Return the frozen model with its attention: (frozen model, run options, machine, precision, packed=...).
    frozen_attention: Callable[..., TeacherPlan | None] = lambda frozen, *inputs, packed: frozen
    # Return the sizes of a frozen copy of the trained model: (options, its shape, precision).
    frozen_copy: Callable[[BuildOptions, ModelShape, Precision], FrozenModelShape | None] = lambda *inputs: None
    gives_predictions: bool = True  # a batch gives predictions and labels, for the metrics of a Python user
    why_no_memory: str = NO_LAYERS  # why no memory is predicted, as a clause

    # ---- model
    scores_texts: bool = False  # the model has a score head and writes no text
    own_loss: bool = False  # the loss is not that of the model's forward with labels
    # Make the model's configuration that of the model to train, in place: (config, options, origin of errors).
    prepare_config: Callable[..., None] = lambda config, options, *origin: None
    # Return the format to which the layers of a frozen model are quantised while they are loaded; None: the method's.
    frozen_as: Callable[[BuildOptions], StoredAs | None] = lambda options: None
    # Return the loaded model with an adapter that it was fine-tuned with; on the meta device, with its sizes.
    adapt: Callable[[BuildOptions, AnyModule], AnyModule] = lambda options, model: model
    # Return a note on the part of the model that starts random: (options, config).
    head_notes: Callable[[BuildOptions, PreTrainedConfig], tuple[str, ...]] = lambda options, config: ()
    # Change the loaded model, after our kernels are in it.
    patch: Callable[[AnyModule], None] = lambda model: None
    # Check the loaded model on a few rows. Raises UserError.
    check_model: Callable[[AnyModule, Plan], None] = lambda model, plan: None
    # Return the model that trains, with what the feature adds to it.
    wrap: Callable[[BuildOptions, AnyModule], nn.Module] = lambda options, model: model
    # Read the sizes of that model; None: those of a model without additions.
    shape: Callable[[AnyModule], ModelShape] | None = None
    # Return the lines of kernels in what the feature adds.
    kernel_lines: Callable[[KernelOptions], tuple[KernelLine, ...]] = lambda kernels: ()
    counts_experts: bool = True  # the load of a mixture's experts is counted and reported
    # Write the trained model; None: as a model of transformers. See training/checkpoint/final_model.py.
    save: Callable[..., tuple[str, dict[str, Any] | None]] | None = None
    saves_base: Callable[[BuildOptions], bool] = lambda options: True  # output_dir/model is written
    saves_adapter: bool = True  # an adapter is saved as it is, not merged
    card_tag: str = "sft"  # the method in the model card's tags

    # ---- report
    # Return the words for the method in a title: (recipe as JSON values, words for the method itself).
    title: Callable[[Mapping[str, Any], str], str] = lambda settings, words: words
    # Return the unit of the loss, for the axis of a chart.
    loss_unit: Callable[[Mapping[str, Any]], str] = lambda settings: "nats per trained token"
    charts: Sequence[MeasureChart] = ()  # of what the task measures, next to its loss
    # Return rows of the printed plan.
    plan_rows: Callable[[Plan], Sequence[tuple[str, str]]] = lambda plan: ()
    # Return tables of what `save` measured.
    result_tables: Callable[[Mapping[str, Any]], Sequence[ResultTable]] = lambda found: ()
    # Return what to type next: (folder of the written model, how to call ligertune).
    next_step: Callable[[Path, str], str] = _generate
    export_note: str = ""  # what `export --check` does not compare
    # Measure of evaluations that early stopping and the best model go by, higher is better; empty: the loss.
    best_measure: str = ""
    # What `ligertune eval` measures on examples, a features.example_scores.ExampleMeasures; None: that of texts.
    evaluation: Any = None

    def judged(self, line: Mapping[str, Any]) -> float:
        """Return what the best evaluation has the least of. line: an evaluation in metrics.jsonl."""
        value: float = -line[f"eval_{self.best_measure}"] if self.best_measure else line["eval_loss"]
        return value

    def best_words(self, value: float) -> str:
        """Return the least such value in words."""
        if not self.best_measure:
            return f"the lowest evaluation loss, {value:.4f}"
        return f"the highest {self.best_measure}, {-value:.4f}"

    def better_words(self, value: float) -> str:
        """Return what would be better than such a value in words."""
        return f"{self.best_measure} above {-value:.4f}" if self.best_measure else f"a loss below {value:.4f}"


@cache
def feature_of(task: str) -> FeatureSpec:
    """Return the spec of the feature with this task; its modules are imported, and torch with them."""
    found = importlib.import_module(f"{package_of_task(task)}.spec")
    return found.SPECS[task]
