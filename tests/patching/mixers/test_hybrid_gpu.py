"""A tiny Qwen3.5 on a GPU: memory savings, compilation, graphs, float8, adapters, a long document, images, experts."""

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ligertune_kernels.ops.moe.dequantize_nf4 import BLOCK, SCALE_BLOCK, dequantize_nf4, quantize_nf4
from support.command_line import RECIPE, losses
from support.models import tiny_models
from support.models.tiny_families import MAPPINGS, WORDS, save_tiny, tiny_config, tiny_family
from support.quickstart_runs import recipe_for, train
from support.same_training import losses_and_gradients, relative_error
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ligertune.data.batching.collate import collate_packed
from ligertune.data.examples import Example
from ligertune.errors import UserError
from ligertune.hardware import this_machine
from ligertune.models.trainable import apply_method
from ligertune.patching.lora.fused_lora import fuse_adapters
from ligertune.patching.mixers.mixer_functions import OPS
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions
from ligertune.planning.precision import check_float8
from ligertune.report import Report

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
MIXERS, LAYERS = 3, 4
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "out_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
STEPS = 6
SETTINGS = {
    "model.dtype": "bfloat16",
    "model.tokenizer.path": str(RECIPE.parent / "stories260K"),
    "data.datasets.0.max_samples": 600,
    "data.val_split": 0,
    "data.packing": True,
    "data.max_length": 512,
    "train.max_steps": STEPS,
    "train.per_device_train_batch_size": 8,
    "train.gradient_accumulation_steps": 1,
    "train.warmup_ratio": 0.0,
    "train.learning_rate": 1e-2,
    "checkpoint.save_model": False,
    "train.cuda_graphs": False,  # else rows are padded to one length wherever a step can be recorded
}
DOCUMENT = 131_072  # tokens
OTHERS = ("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "zamba2")


def tiny_model(kind: str = "causal", family: str = "qwen3_5_text", **text: object) -> PreTrainedModel:
    """Return a random model in float32 of three mixers and one attention layer; text: sizes of its language model."""
    config = tiny_config(CONFIG_MAPPING[family]())
    for name, value in {**HEADS, **text}.items():
        setattr(config.get_text_config(), name, value)
    auto_class, _ = MAPPINGS[kind]
    return tiny_models.random_model(auto_class, config)


def patched_copy(model: PreTrainedModel, mixers: int) -> PreTrainedModel:
    """Return a copy whose mixers all run our kernels in Triton."""
    patched = copy.deepcopy(model)
    report = patch(patched)
    (row,) = (row for row in report.rows if row.kernel == "gated_delta_rule")
    assert (report.backend, row.applied, row.left) == ("triton", mixers, 0)
    return patched


# ---- whole runs


@dataclass(frozen=True)
class Way:
    """Settings of a run that trains as a plain one does.

    within: relative difference of losses from the plain run; None: they have the same bits.
    saves_memory: the peak is lower. applied: the report's number of modules, by kernel. says: a pattern of its notes.
    """

    settings: dict[str, object]
    within: float | None = None
    saves_memory: bool = False
    applied: dict[str, int] = field(default_factory=dict)
    says: str = ""


WAYS = {
    "checkpointing": Way({"train.gradient_checkpointing": True}, saves_memory=True),
    "recompute": Way({"kernels.recompute": True}, saves_memory=True),
    "offload": Way({"train.gradient_checkpointing": "offload"}, saves_memory=True),
    "offload of inputs and gates": Way({"train.gradient_checkpointing": "offload_both"}, saves_memory=True),
    "CUDA graphs": Way(
        {"train.cuda_graphs": True},
        within=0.01,  # cuBLAS may sum in another order for rows of one length
        says="CUDA graphs: [1-9][0-9]* recorded, [1-9][0-9]* micro batches by them",
    ),
    "compiled": Way({"train.torch_compile": True, "train.full_determinism": False}, within=0.01),
    "float8": Way(
        {"train.fp8": True},
        within=0.02,
        applied={"float8_linear": MIXERS * len(PROJECTIONS) + len(ATTENTION) + LAYERS * len(MLP)},
    ),
}


@dataclass(frozen=True)
class Finished:
    """Losses, gradient norms and report of a run."""

    losses: list[float]
    norms: list[float]
    report: Report = field(repr=False)

    @property
    def peak(self) -> int:
        return self.report.peak_memory["allocated_steady"]


def run_of(folder: Path, model: Path, **changes: object) -> Finished:
    report = train(folder, **{**SETTINGS, "model.model_name_or_path": model, **changes})
    return Finished(losses(folder / "run"), losses(folder / "run", "grad_norm"), report)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_model(vocab_size=512, max_position_embeddings=512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(saved, tmp_path_factory) -> Finished:
    return run_of(tmp_path_factory.mktemp("plain"), saved)


@pytest.mark.parametrize("name", WAYS)
def test_a_run_trains_as_a_plain_one(name, saved, plain, tmp_path) -> None:
    found = check_a_run(WAYS[name], saved, plain, tmp_path)
    applied = {line.kernel: line.applied for line in found.report.kernels}
    assert WAYS[name].applied.items() <= applied.items()


@pytest.fixture(scope="module", params=["nemotron_h", "kimi_linear", "lfm2"])
def other(request, tmp_path_factory) -> tuple[Path, Finished]:
    """Return a tiny model of another family, and its plain run."""
    folder = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return folder, run_of(tmp_path_factory.mktemp("plain"), folder)


@pytest.mark.parametrize("name", ["checkpointing", "CUDA graphs", "compiled", "float8"])
def test_a_run_of_another_family_trains_as_a_plain_one(name, other, tmp_path) -> None:
    check_a_run(WAYS[name], *other, tmp_path)


def check_a_run(way: Way, saved: Path, plain: Finished, tmp_path: Path) -> Finished:
    try:
        check_float8(recipe_for(tmp_path, **way.settings), this_machine())
    except UserError as problem:
        pytest.skip(str(problem))
    found = run_of(tmp_path, saved, **way.settings)
    assert len(found.losses) == STEPS and found.losses[-1] < found.losses[0] - 0.5
    if way.within is None:
        assert (found.losses, found.norms) == (plain.losses, plain.norms)
    else:
        assert found.losses == pytest.approx(plain.losses, rel=way.within)
        assert found.norms[0] == pytest.approx(plain.norms[0], rel=5 * way.within)
    if way.saves_memory:
        assert found.peak < plain.peak
    assert re.search(way.says, " ".join(found.report.notes))
    return found


# ---- adapters


def to_four_bits(layer: nn.Linear) -> Tensor:
    """Store a frozen weight in the layout of bitsandbytes, which need not be installed; return what it then holds."""
    weight = layer.weight.detach()
    nf4 = quantize_nf4(weight[None])
    packed = nn.Parameter(nf4.packed.view(-1, 1), requires_grad=False)
    packed.quant_state = SimpleNamespace(
        nested=True, quant_type="nf4", blocksize=BLOCK, shape=weight.shape, dtype=weight.dtype, absmax=nf4.scales,
        offset=nf4.offset, state2=SimpleNamespace(absmax=nf4.block_scales, blocksize=SCALE_BLOCK),
    )  # fmt: skip
    layer.weight = packed
    return dequantize_nf4(nf4, (1, *weight.shape), weight.dtype)[0]


def adapted(model: PreTrainedModel) -> nn.Module:
    """Return the model with an adapter on the projections of mixers, the same in every call."""
    return apply_method(model, MethodOptions(type="lora", lora_r=4, lora_target_modules=list(PROJECTIONS)))


def curve(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """Return the losses of steps on one batch. After the first, every adapter weight must have a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(PROJECTIONS) * MIXERS
    optimizer = torch.optim.SGD(trained, lr=0.1)
    found = []
    for step in range(STEPS):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        assert step == 0 or all(parameter.grad.any() for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("four_bits", [False, True], ids=["lora", "qlora"])
def test_adapters_of_mixers_train_as_in_peft(four_bits) -> None:
    plain = tiny_model().to(DEVICE)
    fused = adapted(patched_copy(plain, MIXERS))
    plain = adapted(plain)
    if four_bits:
        for ours, theirs in zip(fused.modules(), plain.modules(), strict=True):
            if hasattr(ours, "base_layer"):
                theirs.base_layer.weight.data = to_four_bits(ours.base_layer)
    assert fuse_adapters(fused) == len(PROJECTIONS) * MIXERS
    batch = tiny_models.batch(rows=3, length=150, device=DEVICE)
    found, expected = (curve(model, batch) for model in (fused, plain))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0] - 0.05


# ---- one step


def test_a_document_of_131072_tokens_trains() -> None:
    """Labels are the tokens that the model itself expects, so that the loss is low only with the right states.

    Transformers' functions in torch give them and the loss, without gradients.
    """
    model = tiny_model(layer_types=["linear_attention"] * 2, num_hidden_layers=2, max_position_embeddings=DOCUMENT)
    model = model.to(torch.bfloat16).float().to(DEVICE)
    ids = torch.randint(3, WORDS, (DOCUMENT,), generator=torch.Generator().manual_seed(0)).numpy()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None].to(DEVICE), use_cache=False).logits[0, :-1]
    labels = np.append(ids[:1], logits.argmax(-1).cpu().numpy())
    truth = torch.from_numpy(labels[1:]).to(DEVICE)
    expected = float(nn.functional.cross_entropy(logits, truth))
    guessing = float(nn.functional.cross_entropy(logits.roll(1, 0), truth))
    assert expected < guessing - 1

    model = patched_copy(model, mixers=2).to(torch.bfloat16)
    install_packing_checks(model)
    batch = collate_packed([Example(ids, labels, "")], pad_token_id=0)
    batch = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in batch.items()}
    loss, gradients = losses_and_gradients(model, batch, use_cache=False)
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    wrong = [name for name, grad in gradients.items() if not (grad.isfinite().all() and grad.any())]
    assert wrong == []


def image_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return two rows. Each has an image of 4 x 4 patches, then text."""
    config = model.config
    vision = config.vision_config
    batch = tiny_models.batch(rows=2, length=100)
    tokens = 16 // vision.spatial_merge_size**2
    places = torch.zeros_like(batch["input_ids"])
    places[:, 1 : 1 + tokens] = 1
    batch["input_ids"] = batch["input_ids"].clamp(max=WORDS - 1).masked_fill(places == 1, config.image_token_id)
    batch["labels"][places == 1] = -100
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return batch | {
        "pixel_values": torch.randn(2 * 16, size, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": places,
    }


@pytest.mark.parametrize(("kind", "family"), [("image-text", "qwen3_5"), ("causal", "qwen3_5_moe_text")])
def test_a_step_has_the_loss_and_gradients_of_transformers(kind, family) -> None:
    plain = tiny_model(kind, family).to(DEVICE)
    check_a_step(plain, patched_copy(plain, MIXERS))


@pytest.mark.parametrize("family", OTHERS)
def test_a_step_of_another_family_has_the_loss_and_gradients_of_transformers(family) -> None:
    plain = tiny_family("causal", family).to(DEVICE)
    patched = copy.deepcopy(plain)
    report = patch(patched)
    rows = [row for row in report.rows if row.kernel in OPS]
    assert report.backend == "triton" and any(row.applied for row in rows) and not any(row.left for row in rows)
    check_a_step(plain, patched)


def check_a_step(plain: PreTrainedModel, patched: PreTrainedModel) -> None:
    has_images = hasattr(plain.config, "vision_config")
    batch = image_inputs(plain) if has_images else tiny_models.batch(rows=2, length=100)
    batch = {name: value.to(DEVICE) for name, value in batch.items()}
    (loss, gradients), (expected, truth) = (
        losses_and_gradients(model, batch, use_cache=False) for model in (patched, plain)
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert gradients.keys() == truth.keys()
    assert relative_error(gradients, truth) < 1e-3
