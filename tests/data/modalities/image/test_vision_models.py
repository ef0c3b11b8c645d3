"""Vision-language models with and without our kernels: same loss and gradients; padded, packed, frozen, in bfloat16."""

import copy
from importlib.util import find_spec

import pytest
import torch
from support.covering import every_pair
from support.data.image_batches import batch_of, training
from support.models import tiny_vlms
from support.same_training import assert_same, relative_error
from transformers.modeling_layers import GradientCheckpointingLayer

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.attention.image_attention import per_image_attention
from ligertune.data.modalities.image.families import family_of, part_of, prepare_vision
from ligertune.data.modalities.image.recipe import VisionSpec
from ligertune.errors import UserError
from ligertune.models.float8.float8_layers import to_torchao_float8
from ligertune.models.trainable import apply_method
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.patching.patch import patch, unpatch
from ligertune.planning.options import MethodOptions

HYBRID = "qwen3_5"
PACKED = tuple(name for name in tiny_vlms.FAMILIES if name not in ("mllama", "gemma3"))
# towers with as many layers as the language model
DEEP = {"qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0]}, "llava": {"num_hidden_layers": 2}}
NOTHING_FROZEN = VisionSpec(freeze_vision_tower=False, freeze_projector=False)
each_family = pytest.mark.parametrize("family", tiny_vlms.FAMILIES)


def trainable(family, tokenizer, implementation=None, spec=NOTHING_FROZEN):
    """Return a small model prepared for training; implementation: of the attention in its language model."""
    model = tiny_vlms.make(family, tokenizer)
    if implementation is not None:
        model.set_attn_implementation({"": implementation, "text_config": implementation, "vision_config": "sdpa"})
    prepare_vision(model, spec)
    return model


def rows_for(family) -> tuple[int, ...]:
    """Return indices into `four_rows`; a batch of mllama has one number of images per row."""
    return (0, 1) if family == "mllama" else (0, 1, 2, 3)


@each_family
def test_layers_left_out_of_checkpointing_and_adapters_are_of_the_language_model(family, tokenizer_of):
    """A tower with as many layers is not mistaken for the language model."""
    model = tiny_vlms.make(family, tokenizer_of(family), vision=DEEP.get(family))
    depth = model.config.get_text_config().num_hidden_layers
    checkpoint_layers(model, True, first=1)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    text = {name for name in layers if part_of(family_of(model.config), f"{name}.") == "language_model"}
    left_out = {name for name, layer in layers.items() if not layer.gradient_checkpointing}
    assert len(text) == depth and left_out == {name for name in text if not name.endswith(".0")}
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=2))
    names = [name.partition("base_model.model.")[2] for name, p in adapted.named_parameters() if p.requires_grad]
    assert {part_of(family_of(model.config), name) for name in names} == {"language_model"}


@each_family
def test_patched_training_equals_unpatched(family, four_rows, tokenizer_of, reader_of):
    plain = trainable(family, tokenizer_of(family))
    patched = copy.deepcopy(plain)
    patch(patched)
    batch = batch_of(four_rows(family), reader_of(family), rows_for(family))
    for options in ({}, {"num_items_in_batch": 31}):
        found, expected = (training(model, batch, **options) for model in (patched, plain))
        assert_same(found, expected, tolerance=2e-5, least=1e-4)


@each_family
def test_recompute_changes_no_bit(family, four_rows, tokenizer_of, reader_of):
    kept = trainable(family, tokenizer_of(family))
    recomputed = copy.deepcopy(kept)
    patch(kept)
    patch(recomputed, recompute=True)
    batch = batch_of(four_rows(family), reader_of(family), (0, 1))
    assert_same(training(recomputed, batch), training(kept, batch), tolerance=0)


# kernel -> number of modules: text has 2 layers (mllama 3, one of them cross-attention), towers 2 or 3
APPLIED = {
    "qwen2_vl": {"apply_rope": 4, "rms_norm": 5, "layer_norm": 5, "swiglu": 2, "linear_cross_entropy": 1},
    "qwen2_5_vl": {"apply_rope": 4, "rms_norm": 10, "swiglu": 4, "linear_cross_entropy": 1},
    "qwen3_vl": {"apply_rope": 5, "rms_norm": 9, "layer_norm": 9, "swiglu": 2, "linear_cross_entropy": 1},
    "qwen3_5": {
        "apply_rope": 3,
        "rms_norm": 7,
        "gated_rms_norm": 1,
        "layer_norm": 5,
        "swiglu": 2,
        "gated_delta_rule": 1,
        "linear_cross_entropy": 1,
    },
    "mllama": {"apply_rope": 2, "rms_norm": 9, "layer_norm": 10, "swiglu": 3, "linear_cross_entropy": 1},
    "llava": {"apply_rope": 2, "rms_norm": 5, "layer_norm": 8, "swiglu": 2, "linear_cross_entropy": 1},
    "gemma3": {"apply_rope": 2, "rms_norm": 14, "layer_norm": 6, "geglu": 2, "linear_cross_entropy": 1},
}


@each_family
def test_the_expected_modules_are_patched(family, tokenizer_of):
    model = tiny_vlms.make(family, tokenizer_of(family))
    report = patch(model)
    assert {row.kernel: row.applied for row in report.rows if row.applied} == APPLIED[family]
    assert [row for row in report.rows if row.left] == []
    state = model.state_dict().keys()
    unpatch(model)
    assert model.state_dict().keys() == state


@pytest.mark.parametrize("family", tiny_vlms.QWEN)
def test_the_tower_attends_to_all_images_in_one_call(family, four_rows, tokenizer_of, reader_of):
    """The lengths of images (in Qwen2.5-VL of their windows) reach the attention; there is no loop over images."""
    model = tiny_vlms.make(family, tokenizer_of(family))
    patch(model)
    forward = type(model.model.visual.blocks[0].attn).forward
    table = (getattr(forward, "__wrapped__", forward)).__globals__["ALL_ATTENTION_FUNCTIONS"]
    assert table.get_interface("sdpa", None) is per_image_attention
    with torch.no_grad():
        model(**batch_of(four_rows(family), reader_of(family), (0, 1, 2, 3)))


@each_family
def test_rows_of_a_padded_batch_equal_single_rows(family, four_rows, tokenizer_of, reader_of):
    model, rows, reader = tiny_vlms.make(family, tokenizer_of(family)).eval(), four_rows(family), reader_of(family)
    singles = []
    with torch.no_grad():
        together = model(**batch_of(rows, reader, rows_for(family), multiple_of=16)).logits
        for place, index in enumerate(rows_for(family)):
            singles.append(model(**batch_of(rows, reader, (index,))).logits[0])
            length = len(rows.train[index].input_ids)
            torch.testing.assert_close(together[place, :length], singles[-1][:length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family, implementation, patched", every_pair(PACKED, ["document_attention", "per_document", "sdpa"], [False, True])
)
def test_packed_training_equals_single_documents(family, implementation, patched, four_rows, tokenizer_of, reader_of):
    if family == HYBRID and not patched:
        pytest.skip("transformers' own recurrence does not keep documents apart")
    rows, reader = four_rows(family), reader_of(family)
    single = trainable(family, tokenizer_of(family), "sdpa")
    model = trainable(family, tokenizer_of(family), implementation)
    if patched:
        patch(model)
    total = int(rows.train.trained.sum())
    loss, gradients = torch.zeros(()), {}
    for index in range(4):
        part, found = training(single, batch_of(rows, reader, (index,)), num_items_in_batch=total)
        loss += part
        gradients = {name: gradients.get(name, 0) + gradient for name, gradient in found.items()}
    install_packing_checks(model)
    batch = batch_of(rows, reader, (0, 1, 2, 3), packed=True, multiple_of=16)
    assert_same(training(model, batch, num_items_in_batch=total), (loss, gradients), tolerance=5e-5, least=1e-4)


@each_family
@pytest.mark.parametrize("frozen", ["vision_tower", "projector", "language_model", "vision_tower projector"])
def test_exactly_the_unfrozen_parts_get_gradients(family, frozen, four_rows, tokenizer_of, reader_of):
    parts = ("vision_tower", "projector", "language_model")
    spec = VisionSpec(**{f"freeze_{part}": part in frozen.split() for part in parts})
    model = trainable(family, tokenizer_of(family), spec=spec)
    patch(model)
    runs = []
    tower = model.get_submodule(family_of(model.config).vision_tower[0].rstrip("."))
    tower.register_forward_hook(lambda module, args, output: runs.append(output.last_hidden_state.requires_grad))
    _, gradients = training(model, batch_of(four_rows(family), reader_of(family), (0, 1)))
    with_gradient = {part_of(family_of(model.config), name) for name, g in gradients.items() if g.abs().sum() > 0}
    assert with_gradient == set(parts) - set(frozen.split())
    if family == "llava" and "vision_tower" in with_gradient:
        assert any("encoder.layers.1." in name for name in gradients)  # the features are the second of three layers'
    # ranks would wait for a parameter without a gradient
    assert {name for name, p in model.named_parameters() if p.requires_grad} == gradients.keys()
    if frozen == "vision_tower projector":
        assert runs == [False]  # the tower ran once, without autograd
        with pytest.raises(UserError, match="nothing would be trained"):
            trainable(family, tokenizer_of(family), spec=VisionSpec(freeze_language_model=True))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@each_family
def test_a_batch_of_text_gives_the_tower_zero_gradients(family, packed, four_rows, tokenizer_of, reader_of):
    """The text's loss and gradients are those of a plain text batch."""
    if packed and family not in PACKED:
        pytest.skip("does not pack")
    rows = four_rows(family)
    model = trainable(family, tokenizer_of(family), "per_document" if packed else "sdpa")
    if packed:
        patch(model)
        install_packing_checks(model)
    loss, gradients = training(model, batch_of(rows, reader_of(family), (3,), packed=packed))
    vision = [g for name, g in gradients.items() if part_of(family_of(model.config), name) != "language_model"]
    assert vision and not any(gradient.any() for gradient in vision)
    plain = {name: torch.tensor(getattr(rows.train[3], name)[None]).long() for name in ("input_ids", "labels")}
    single = trainable(family, tokenizer_of(family), "sdpa", VisionSpec())
    expected, truth = training(single, plain)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, gradient in truth.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install torchao")
@each_family
def test_only_the_language_model_multiplies_in_float8(family, four_rows, tokenizer_of, reader_of):
    exact = trainable(family, tokenizer_of(family), spec=VisionSpec(freeze_projector=False))
    patched = copy.deepcopy(exact)
    patch(patched)
    to_torchao_float8(patched)
    batch = batch_of(four_rows(family), reader_of(family), (0,), multiple_of=16)
    found, truth = training(patched, batch), training(exact, batch)
    assert 1e-6 < abs(float(found[0] / truth[0]) - 1) < 2e-2
    assert found[1].keys() == truth[1].keys()
    quantised = [name for name, module in patched.named_modules() if type(module).__name__ == "Float8Linear"]
    assert {part_of(family_of(patched.config), f"{name}.weight") for name in quantised} == {"language_model"}
    assert not any("lm_head" in name for name in quantised)


LENGTHS = (4, 64, 256, 1020)  # a blank image, small ones, one that ends within a block


def attend(tensors, lengths):
    """Return (out, dq, dk, dv) of images of these lengths, concatenated to (1, H, S, D)."""
    leaves = [t.detach().requires_grad_(True) for t in tensors]
    bounds = torch.tensor([0, *lengths], device=leaves[0].device).cumsum(0).to(torch.int32)
    out, _ = per_image_attention(torch.nn.Identity(), *leaves, None, scaling=0.1, cu_seq_lens_q=bounds)
    out.backward(torch.cos(torch.arange(out.numel(), device=out.device)).view_as(out).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 80])  # 80: Qwen2-VL's
def test_one_launch_equals_a_loop_over_images(head_dim):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, 4, sum(LENGTHS), head_dim)
    truth = [torch.randn(shape, device="cuda", generator=generator) for _ in range(3)]
    half = [t.bfloat16() for t in truth]
    for found, expected in zip(attend(half, LENGTHS), attend([t.float() for t in half], LENGTHS), strict=True):
        assert (found.float() - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_an_image_attends_to_itself_only():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]
    together = attend(tensors, (4, 16))
    alone = attend([t[:, :, 4:] for t in tensors], (16,))
    torch.testing.assert_close(together[0][:, 4:], alone[0])


@pytest.mark.gpu
@each_family
def test_bfloat16_training_with_kernels_is_as_close_to_fp32_as_without(family, four_rows, tokenizer_of, reader_of):
    batch = batch_of(four_rows(family), reader_of(family), (0, 1))
    batch = {name: value.cuda() for name, value in batch.items()}
    exact = trainable(family, tokenizer_of(family)).cuda()
    _, truth = training(exact, batch)
    errors = []
    for patched in (True, False):
        model = copy.deepcopy(exact)
        if patched:
            patch(model)
        _, found = training(model.bfloat16(), batch)
        errors.append(float(relative_error(found, truth)))
    assert errors[0] <= 1.25 * errors[1] + 2e-3
