"""Checks of a run: packed documents are isolated, context parallelism is exact, losses are finite and fused, memory."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.attention.document_isolation import (
    LogitsAreNaN,
    check_document_isolation,
    evaluate_batch,
    why_not_isolated,
)
from ligertune.attention.padding_free import about_padding_free
from ligertune.data.batching.collate import Batcher, collate_packed
from ligertune.data.batching.context_parallel import ContextParallelSplit
from ligertune.data.examples import Example
from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError
from ligertune.files.storage import write_text
from ligertune.models.load import build_model
from ligertune.models.read_config import RECURRENT_LAYERS, may_carry_state, unknown_layers
from ligertune.patching.deferred_logits import LossCounts
from ligertune.patching.mixers.kernel_mixers import KernelMixer
from ligertune.patching.mixers.recognise_mixers import state_carriers, why_without_kernel
from ligertune.patching.packing_checks import prepare_masks
from ligertune.patching.patch import patch
from ligertune.planning.memory.fit import advice
from ligertune.planning.options import BuildOptions
from ligertune.planning.plan import LOSS_KERNELS, KernelLine, Plan
from ligertune.training.optim.algorithms import KernelAdamW
from ligertune.training.parallel.distributed import reshard

MOST_ALIGNED = 128  # tokens: each attention needs a divisor of it (`attention.choice`)
# The largest relative differences of (logits, loss) between a row computed in parts and as a whole. bfloat16 rounds
# attention's other order of summation; a part without its labels would miss at least 1 / C of them, 3 %.
EXACT = (1e-4, 1e-4)
ROUNDED = (3e-2, 5e-3)


def carried_state(options: BuildOptions, config: PreTrainedConfig) -> str | None:
    """Return which layers carry state from one document of a packed row into the next, in words, or None.

    Those that our kernels compute do not. The model is built on the meta device, where its configuration leaves open
    whether it has such layers; without what the task adds, which data that are not read yet may decide.
    """
    return " and ".join(_carrying_layers(options, config)) or None


def _carrying_layers(options: BuildOptions, config: PreTrainedConfig) -> dict[str, str]:
    """Return the layers of `carried_state`, each with the reason why no kernel keeps documents apart in it."""
    if not may_carry_state(config):
        return {}
    if kinds := unknown_layers(config):
        return dict.fromkeys(kinds, "nothing is known of layers of this kind")
    model = _without_weights(options, config, "eager")
    reasons = {}
    for module in state_carriers(model):
        name = type(module).__name__
        if not isinstance(module, KernelMixer) and name not in reasons:
            reasons[name] = why_without_kernel(module)
    if not reasons and not any(isinstance(module, KernelMixer) for module in model.modules()):
        # layers that the configuration names, of a form that is not recognised, such as MiniMax's lightning attention
        layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
        reasons = dict.fromkeys(RECURRENT_LAYERS.intersection(layer_types), "their form is not recognised")
    return dict(sorted(reasons.items()))


def _describe_carrying(reasons: dict[str, str], config: PreTrainedConfig) -> str:
    """Return why a model with such layers does not pack, in words."""
    does = "may see" if unknown_layers(config) else "carry state"
    if len(set(reasons.values())) == 1:
        (why,) = set(reasons.values())
    else:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    layers = " and ".join(reasons)
    return f"{layers} layers {does} from one document of a packed row into the next. No kernel keeps them apart: {why}"


# transformers finds documents by position_ids for these, if at all: the check before training decides
_SEARCH_POSITIONS = ("eager", "flex_attention", "flash_attention_2")


# of models that this process has looked at: a sweep plans one model many times
_packing_reasons: dict[tuple[str, ...], str | None] = {}


def why_not_packed(options: BuildOptions, config: PreTrainedConfig) -> str | None:
    """Return why documents of a packed row would influence each other in this model, or None if nothing shows it."""
    kernels = options.kernels
    key = (options.model.model_dump_json(), repr(config), str(kernels.enabled), str(kernels.mixer))
    if key not in _packing_reasons:
        _packing_reasons[key] = _find_packing_reason(options, config)
    return _packing_reasons[key]


def _find_packing_reason(options: BuildOptions, config: PreTrainedConfig) -> str | None:
    if reasons := _carrying_layers(options, config):
        return _describe_carrying(reasons, config)
    if options.model.attn_implementation in _SEARCH_POSITIONS or not modality_of(config).facts.packs_exactly:
        return None
    try:
        model = _without_weights(options, config, "per_document")
    except UserError as problem:  # if it is another fault, building the model that trains finds it, too
        why = problem.message.rstrip(".")
        return f"models of type {config.model_type} cannot attend within documents: {why}"
    prepare_masks(model)
    return why_not_isolated(model)


def _without_weights(options: BuildOptions, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return the model on the meta device with kernels of mixers, without what the task adds."""
    spec = options.model.model_copy(update={"attn_implementation": attention})
    model = build_model(spec, copy.deepcopy(config), dtype=torch.bfloat16, device="meta", seed=options.seed)
    if may_carry_state(config) and options.kernels.enabled is not False and options.kernels.mixer:
        patch(model, rope=False, norm=False, mlp=False, loss="torch")
    return model


def why_not_padding_free(plan: Plan, model: PreTrainedModel) -> str | None:
    """Return why padding-free batches would train wrongly, or None. Raises UserError if the recipe requires them."""
    try:
        # graphs need rows of one length, and this check does not: logits of a whole row would take gigabytes
        multiple_of = math.gcd(plan.rows.multiple_of, MOST_ALIGNED * plan.parallel.cp_size)
        check_document_isolation(model, multiple_of=multiple_of)
    except LogitsAreNaN:
        raise
    except UserError as problem:
        if plan.rows.packed:
            raise
        if plan.data_options.padding_free is True:
            raise about_padding_free(problem) from problem
        return problem.message.removeprefix("data.packing: ")
    return None


def check_context_parallel(plan: Plan, model: nn.Module, batcher: Batcher, *, vocab_size: int) -> None:
    """Raise UserError if ranks that share a row compute something else than one rank with the whole row.

    All ranks call it, after a checkpoint is loaded. A model that finds labels or documents in another way would
    otherwise be trained wrongly without a message.
    """
    if batcher.context_parallel is None:
        return
    logits, loss = context_parallel_error(model, batcher, batcher.context_parallel, vocab_size=vocab_size)
    reshard(model)
    most = ROUNDED if plan.precision.half else EXACT
    if not (logits <= most[0] and loss <= most[1]):
        raise UserError(
            f"parallel.cp_size: a part of a row does not give what the whole row does in this {plan.model_family} "
            f"(logits differ by {logits:.1e}, the loss by {loss:.1e}).",
            hint="Leave it out.",
        )


def context_parallel_error(
    model: nn.Module, batcher: Batcher, split: ContextParallelSplit, *, vocab_size: int
) -> tuple[float, float]:
    """Return the relative errors (of this rank's logits, of the loss over ranks) against the whole row."""
    length = 2 * batcher.multiple_of
    tokens = np.random.default_rng(0).integers(vocab_size, size=length)
    cut = length // 3  # the second document then lies in several parts
    examples = [Example(ids, ids, "") for ids in (tokens[:cut], tokens[cut:])]
    whole = collate_packed(examples, pad_token_id=batcher.pad_token_id)
    outputs = [
        evaluate_batch(model, batch, batcher.device, num_items_in_batch=length) for batch in (whole, split.cut(whole))
    ]
    (logits, loss), (part_logits, part_loss) = ((out.logits[0].float(), out.loss.float()) for out in outputs)
    dist.all_reduce(part_loss, group=split.group)
    own = logits[split.tokens(length).to(batcher.device)]
    difference = torch.linalg.vector_norm(part_logits - own) / torch.linalg.vector_norm(own)
    return float(difference), float((part_loss - loss).abs() / loss)


class FiniteLossCheck:
    """Stop a run whose loss is not finite before the next checkpoint, and write the batch that caused it.

    It remembers the steps since the last logged line. Their losses stay on the device, so nothing synchronises.
    """

    def __init__(self, output_dir: Path, batcher: Batcher, *, rank: int) -> None:
        self._output_dir = output_dir
        self._batcher = batcher
        self._rank = rank
        self._steps: list[tuple[int, Tensor, Sequence[Sequence[np.ndarray]]]] = []

    def add(self, step: int, loss_sum: Tensor, micro_batches: Sequence[Sequence[np.ndarray]]) -> None:
        """Add a step. loss_sum (): this rank's losses so far; once it is not finite, it stays so."""
        self._steps.append((step, loss_sum.clone(), micro_batches))

    def is_finite(self, grad_norm: Tensor | None) -> bool:
        """Return whether the last step's loss and gradient norm are finite. Waits for the device."""
        numbers = [self._steps[-1][1]] if self._steps else []
        numbers += [] if grad_norm is None else [grad_norm]
        return all(bool(torch.isfinite(number)) for number in numbers)

    def forget(self) -> None:
        """Forget all steps but the last: the losses so far are finite, the last step's gradients may not be."""
        del self._steps[:-1]

    def error(self) -> UserError:
        """Write the batch of the first step whose loss is not finite; return the error that ends the run."""
        bad = [(step, batches) for step, loss, batches in self._steps if not bool(torch.isfinite(loss))]
        step, batches = bad[0] if bad else (self._steps[-1][0], self._steps[-1][2])
        path = self._output_dir / f"bad_batch-step-{step}-rank-{self._rank}.json"
        micro_batches = [[[self._example(int(i)) for i in row] for row in rows] for rows in batches]
        contents = json.dumps({"step": step, "micro_batches": micro_batches}, indent=1)
        write_text(path, contents + "\n")
        what = "The loss" if bad else "A gradient, or the loss of another rank,"
        return UserError(
            f"{what} of step {step} is not a number. Its batch is in {path}. No checkpoint was written since.",
            hint="Look at the batch, lower train.learning_rate or raise train.warmup_steps, and go on with --resume.",
            exit_code=1,
        )

    def _example(self, index: int) -> dict[str, Any]:
        """Return an example of a bad batch: index in the data set, source, token ids, labels."""
        example = self._batcher.examples[index]
        ids = {name: getattr(example, name).tolist() for name in ("input_ids", "labels")}
        return {"index": index, "source": example.source, **ids}


class OutOfDeviceMemory(UserError):
    """The device ran out of memory. Sweeps over batch sizes catch it."""


def kernels_as_run(
    lines: Sequence[KernelLine], counts: LossCounts, optimizer: torch.optim.Optimizer
) -> tuple[KernelLine, ...]:
    """Return the lines of a plan's kernels, with the fused loss as left out if the steps did not compute it.

    A line is added for the kernel of AdamW if it ran.
    """
    stepped = optimizer.stepped_by_kernel if isinstance(optimizer, KernelAdamW) else 0
    lines = (*lines, KernelLine("adamw_step", stepped, 0, "")) if stepped else lines
    reasons = {line.kernel: why_not_fused((line,), counts) for line in lines}
    return tuple(
        line if (why := reasons[line.kernel]) is None else replace(line, applied=0, left=line.applied, note=why)
        for line in lines
    )


def why_not_fused(lines: Iterable[KernelLine], counts: LossCounts) -> str | None:
    """Return why no loss was fused although the plan says so; None if one was, or if none was computed yet."""
    planned = [line.kernel for line in lines if line.kernel in LOSS_KERNELS and line.applied]
    if not planned or counts.fused or not (counts.materialised or counts.elsewhere):
        return None
    reasons = "; ".join(counts.materialised) or "the model's loss_function was not called"
    return f"{planned[0]} was planned but did not run; logits are made, with more memory: {reasons}"


@contextlib.contextmanager
def explain_out_of_memory(plan: Plan) -> Iterator[None]:
    """Replace torch's OutOfMemoryError by OutOfDeviceMemory, with the plan's estimate and the keys to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        requested = re.search(r"Tried to allocate [\d.]+ \w+", str(error))
        peak = plan.peak
        expected = ""
        if peak is not None:
            parts = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in peak.parts().items() if size)
            expected = f" The plan expects {peak.total / 2**30:.2f} GiB: {parts}."
        raise OutOfDeviceMemory(
            f"{plan.machine.name} with {plan.machine.memory_bytes / 2**30:.1f} GiB ran out of memory"
            f"{': ' + requested[0].replace('Tried', 'tried') if requested else ''}.{expected}",
            hint=advice(plan),
            exit_code=1,
        ) from error
