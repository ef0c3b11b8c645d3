"""The teacher of a distillation: planned before data are prepared, loaded after the student, and never trained."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ligertune.attention.choice import AttentionDemands, choose_attention
from ligertune.attention.document_isolation import check_document_isolation
from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError, plural
from ligertune.features.distill.divergence import TeacherHead
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.output_head import backbone_of, check_plain_head, logit_transform
from ligertune.files.model_files import ModelOrigin
from ligertune.models.load import build_model
from ligertune.models.load_tokenizer import read_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.score_head import lm_head_of
from ligertune.models.shape import read_frozen_shape
from ligertune.patching.packing_checks import prepare_masks
from ligertune.patching.patch import patch
from ligertune.planning.plan import Plan, TeacherPlan
from ligertune.planning.precision import Dtype, Precision

if TYPE_CHECKING:
    from ligertune.hardware import Machine
    from ligertune.planning.options import BuildOptions, ModelOptions, RunOptions

TEACHER = ModelOrigin("distill.teacher", "write model.trust_remote_code: true, which holds for the teacher too")
HINT = "A teacher needs a linear output head without a bias on the last hidden state, as in Llama."
# Fields of a batch that only the student's forward reads.
OF_STUDENT = ("labels", "shift_labels", "num_items_in_batch", "labelled_rows")


def plan_teacher(
    options: RunOptions,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    machine: Machine,
    precision: Precision,
) -> TeacherPlan | None:
    """Return the teacher of a recipe with task: distill, without its attention; None if its file is read instead.

    Raises UserError if it does not fit.
    config, tokenizer, precision: of the student.
    """
    if options.build.task != "distill":
        return None
    if not modality_of(config).is_text:
        raise UserError(
            f"task: distill trains text models, and this {config.model_type} model reads {modality_of(config).inputs}.",
            hint="Choose a text model, or write task: sft.",
        )
    if options.build.section(DistillSpec).teacher_file is not None:
        return None
    spec = teacher_options(options.build, "auto")
    teacher = read_config(spec, TEACHER)
    if not modality_of(teacher).is_text:
        reads = modality_of(teacher).inputs
        raise TEACHER.error(f"{spec.model_name_or_path} reads {reads}.", hint="Name a text model.")
    dtype = _dtype(options.build.section(DistillSpec).teacher_dtype, machine, precision)
    meta = {"dtype": getattr(torch, dtype), "device": "meta", "seed": 0, "origin": TEACHER}
    model = build_model(spec, teacher, **meta)
    check_plain_head(model, TEACHER, HINT)
    notes = compare_vocabularies(
        spec.model_name_or_path,
        (tokenizer.get_vocab(), config.get_text_config().vocab_size),
        (read_tokenizer(spec, TEACHER).get_vocab(), teacher.get_text_config().vocab_size),
    )
    return TeacherPlan(
        name=spec.model_name_or_path,
        dtype=dtype,
        shape=read_frozen_shape(
            model,
            dtype,
            four_bits=options.build.section(DistillSpec).teacher_load_in_4bit,
            offloaded=options.build.section(DistillSpec).teacher_offload,
        ),
        n_parameters=sum(p.numel() for p in model.parameters()),
        notes=notes,
    )


def with_attention(
    teacher: TeacherPlan | None, options: RunOptions, machine: Machine, precision: Precision, *, packed: bool
) -> TeacherPlan | None:
    """Return the teacher with its attention for packed rows. Raises UserError if it cannot take them."""
    if teacher is None or not packed:
        return teacher
    half = teacher.dtype != "float32"
    allowed: Literal["auto"] | bool = "auto" if options.layout.document_attention else False
    try:
        attention = choose_attention(
            AttentionDemands("auto", packing=True, own_kernel=allowed),
            read_config(teacher_options(options.build, "auto"), TEACHER),
            machine,
            replace(precision, weights=teacher.dtype, autocast="no") if half else Precision("float32", "no"),
        )
    except UserError as problem:
        raise _about_packing(problem) from problem
    return replace(teacher, attn_implementation=attention.implementation, multiple_of=attention.multiple_of)


def _about_packing(problem: UserError) -> UserError:
    return TEACHER.error(
        f"the teacher takes no packed rows: {problem.message.removeprefix('data.packing: ')}",
        hint="Write data.packing: false and data.padding_free: false.",
    )


def teacher_options(options: BuildOptions, attention: str) -> ModelOptions:
    """Return the teacher as a `model` section. attention: name of its implementation, or auto."""
    distill = options.section(DistillSpec)
    return options.model.model_copy(
        update={
            "model_name_or_path": distill.teacher,
            "revision": distill.teacher_revision,
            "init": "pretrained",
            "num_hidden_layers": None,
            "rope_parameters": type(options.model.rope_parameters)(),
            "attn_implementation": attention,
            "tokenizer": type(options.model.tokenizer)(),
        }
    )


def _dtype(wanted: Dtype | Literal["auto"], machine: Machine, precision: Precision) -> Dtype:
    """Return the dtype of the teacher's weights. auto: that in which the student computes."""
    computes: dict[str, Dtype] = {"no": precision.weights, "fp16": "float16", "bf16": "bfloat16"}
    if wanted == "auto":
        return computes[precision.autocast]
    if wanted == "bfloat16" and not machine.has_bfloat16:
        raise UserError(
            f"distill.teacher_dtype: bfloat16 is not supported by {machine.name} ({machine.arch}).",
            hint="Write float16 or float32.",
        )
    return wanted


Vocabulary = tuple[dict[str, int], int]  # token -> id of a tokenizer, and rows of the model's output head


def compare_vocabularies(name: str, student: Vocabulary, teacher: Vocabulary) -> tuple[str, ...]:
    """Return notes on differences that training handles. Raises UserError for another vocabulary.

    Ids that both tokenizers have must be the same tokens. The student may have tokens that the teacher's tokenizer
    lacks. The teacher's embedding must have rows for all tokens of the student, also where its own tokenizer has them.
    """
    (tokens, size), (taught, teacher_size) = student, teacher
    by_id = {index: token for token, index in taught.items()}
    different = sorted((i, token, by_id[i]) for token, i in tokens.items() if i in by_id and by_id[i] != token)
    if different:
        index, here, there = different[0]
        raise TEACHER.error(
            f"{name} has another vocabulary than the student: id {index} is {there!r} there and {here!r} here "
            f"({plural(len(different), 'id')} of {len(tokens):,} differ).",
            hint="Choose a teacher of the student's family, or let it write answers and train on them with task: sft.",
        )
    missing = sorted(index for index in tokens.values() if index not in by_id)
    highest = max(tokens.values(), default=-1)
    if highest >= teacher_size:
        own = highest in by_id
        raise TEACHER.error(
            f"{name} has no embedding for id {highest} of the student's tokenizer; its last is {teacher_size - 1}.",
            hint="Use another teacher."
            if own
            else "Use the teacher's tokenizer (model.tokenizer.path), or another teacher.",
        )
    notes = [f"distill: the teacher was not trained on {plural(len(missing), 'token')} of the student's tokenizer"]
    notes = notes if missing else []
    if size != teacher_size:
        longer, by = ("student", size - teacher_size) if size > teacher_size else ("teacher", teacher_size - size)
        notes.append(
            f"distill: the {longer}'s output head has {plural(by, 'more row')} than the other's; "
            "they pad the vocabulary and are left out of the divergence"
        )
    return tuple(notes)


class Teacher:
    """A frozen model that gives last hidden states. Its logits never exist as a whole."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._backbone = backbone_of(model)
        self.head = TeacherHead(lm_head_of(model).weight, logit_transform(model, TEACHER, HINT))

    @torch.no_grad()
    def hidden_states(self, batch: dict[str, Any]) -> Tensor:
        """Return the last hidden states (N, E') of all tokens of a batch."""
        inputs = {name: value for name, value in batch.items() if name not in OF_STUDENT}
        return self._backbone(**inputs, use_cache=False)[0].flatten(0, -2)


def load_teacher(plan: Plan, device: torch.device) -> Teacher:
    """Load the teacher of a plan: frozen, in evaluation mode, with our kernels if the plan uses them."""
    teacher = plan.teacher
    assert teacher is not None  # `plan_teacher` leaves it out only where its file is read
    kernels = plan.build.kernels
    attention = teacher.attn_implementation if plan.rows.is_padding_free else None
    spec = teacher_options(plan.build, attention or "auto")
    dtype = getattr(torch, teacher.dtype)
    distill = plan.build.section(DistillSpec)
    model = build_model(
        spec,
        read_config(spec, TEACHER),
        dtype=dtype,
        device="cpu" if distill.teacher_offload else device,
        seed=0,
        stored_as="nf4" if distill.teacher_load_in_4bit else None,
        origin=TEACHER,
    )
    if kernels.enabled is not False:
        patch(model, rope=kernels.rope, norm=kernels.norm, mlp=kernels.mlp, mixer=kernels.mixer, loss="torch")
    model.requires_grad_(False)
    model.eval()
    if distill.teacher_offload:
        offload_layers(model, device)
    found = Teacher(model)
    tokens = {"input_ids": torch.tensor([[1, 2]], device=device)}
    if not bool(found.hidden_states(tokens).isfinite().all()):
        raise TEACHER.error(
            f"this {type(model).__name__} computes NaN or infinity.",
            hint="Its weights are damaged, or too large for distill.teacher_dtype.",
        )
    prepare_masks(backbone_of(model))
    if plan.rows.is_padding_free:
        try:
            check_document_isolation(model, multiple_of=plan.rows.multiple_of)
        except UserError as problem:
            raise _about_packing(problem) from problem
    return found


def offload_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Move a frozen model to `device` except its layers, which are copied there one at a time, for their forward."""
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise UserError(
            f"distill.teacher_offload: the layers of this {type(model).__name__} are not known.", hint="Leave it out."
        )
    inside = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(device)
    for layer in layers:
        _offload(layer, device)


def _offload(layer: nn.Module, device: torch.device) -> None:
    tensors = [*layer.parameters(), *layer.buffers()]
    held = [tensor.data.pin_memory() if device.type == "cuda" else tensor.data for tensor in tensors]

    def copy_in(module: nn.Module, args: tuple[Any, ...]) -> None:
        for tensor, host in zip(tensors, held, strict=True):
            tensor.data = host.to(device, non_blocking=True)

    def drop(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor, host in zip(tensors, held, strict=True):
            tensor.data = host

    layer.register_forward_pre_hook(copy_in)
    layer.register_forward_hook(drop, always_call=True)
