"""Models that see, with and without our kernels: the same loss and gradients, padded, packed, and with parts frozen."""

from __future__ import annotations

import copy

import pytest
import tiny_vlms
import torch
from asked_rows import asked
from batches_of import assert_same_training, batch_of, training
from transformers.modeling_layers import GradientCheckpointingLayer

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.attention.packed_documents import guard
from ligertune.errors import UserError
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch, unpatch
from ligertune.planning.options import MethodOptions, VisionOptions
from ligertune.vision.families import family_of, part_of
from ligertune.vision.freeze import prepare_vision

PACKED = tuple(name for name, row in tiny_vlms.TOKENS.items() if name not in ("mllama", "gemma3"))
# of as many layers as the language model has
DEEP = {"qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0]}, "llava": {"num_hidden_layers": 2}}
NOTHING_FROZEN = VisionOptions(freeze_vision_tower=False, freeze_projector=False)


@pytest.fixture
def seen(prepared_for, pictures):
    """Four rows: one image, another shape of image, two images apart, text only."""

    def rows(family):
        return prepared_for(
            family,
            [
                asked("<image>\nWhat is this?", "Yes. It is a red square.", pictures["red"]),
                asked("Who are they? <image>", "a system", pictures["blue"]),
                asked("<image> and <image> in 2015?", "They are a system", pictures["green"], pictures["red"]),
                asked("What is the value of 38?", "It is 2015."),
            ],
        )

    return rows


def attending(family, tokenizer, implementation):
    """A small model whose text attends in this way."""
    model = tiny_vlms.make(family, tokenizer)
    model.set_attn_implementation({"": implementation, "text_config": implementation, "vision_config": "sdpa"})
    return model


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_the_language_models_layers_are_those_that_checkpointing_leaves_out(family, tokenizer_of):
    """Of towers as deep, too: all of theirs are checkpointed."""
    model = tiny_vlms.make(family, tokenizer_of(family), vision=None if family == "mllama" else DEEP.get(family))
    depth = model.config.get_text_config().num_hidden_layers
    checkpoint_layers(model, True, first=1)
    asked = {name: module.gradient_checkpointing for name, module in model.named_modules()
             if isinstance(module, GradientCheckpointingLayer)}  # fmt: skip
    of_words = {name for name in asked if part_of(family_of(model.config), f"{name}.") == "language_model"}
    left_out = {name for name, checkpoints in asked.items() if not checkpoints}
    assert len(of_words) == depth and left_out == {name for name in of_words if not name.endswith(".0")}


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_patched_training_equals_unpatched(family, seen, tokenizer_of, reader_of):
    plain = tiny_vlms.make(family, tokenizer_of(family))
    prepare_vision(plain, NOTHING_FROZEN)
    ours = copy.deepcopy(plain)
    patch(ours)
    indices = (0, 1) if family == "mllama" else (0, 1, 2, 3)
    batch = batch_of(seen(family), reader_of(family), indices)
    assert_same_training(training(ours, batch), training(plain, batch), tolerance=2e-5)
    assert_same_training(
        training(ours, batch, num_items_in_batch=31), training(plain, batch, num_items_in_batch=31), tolerance=2e-5
    )


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_what_the_backward_makes_again_changes_no_bit(family, seen, tokenizer_of, reader_of):
    ours = tiny_vlms.make(family, tokenizer_of(family))
    prepare_vision(ours, NOTHING_FROZEN)
    rebuilt = copy.deepcopy(ours)
    patch(ours)
    patch(rebuilt, recompute=True)
    batch = batch_of(seen(family), reader_of(family), (0, 1))
    assert_same_training(training(rebuilt, batch), training(ours, batch), tolerance=0)


# kernel -> on how many modules: text 2 layers (mllama 3, one of them cross-attention), towers of 2 or 3 layers
APPLIED = {
    "qwen2_vl": {"apply_rope": 4, "rms_norm": 5, "layer_norm": 5, "swiglu": 2, "linear_cross_entropy": 1},
    "qwen2_5_vl": {"apply_rope": 4, "rms_norm": 10, "swiglu": 4, "linear_cross_entropy": 1},
    "qwen3_vl": {"apply_rope": 5, "rms_norm": 9, "layer_norm": 9, "swiglu": 2, "linear_cross_entropy": 1},
    "mllama": {"apply_rope": 2, "rms_norm": 9, "layer_norm": 10, "swiglu": 3, "linear_cross_entropy": 1},
    "llava": {"apply_rope": 2, "rms_norm": 5, "layer_norm": 8, "swiglu": 2, "linear_cross_entropy": 1},
    "gemma3": {"apply_rope": 2, "rms_norm": 14, "layer_norm": 6, "geglu": 2, "linear_cross_entropy": 1},
}


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_what_is_patched_is_known(family, tokenizer_of):
    model = tiny_vlms.make(family, tokenizer_of(family))
    report = patch(model)
    assert {row.kernel: row.applied for row in report.rows if row.applied} == APPLIED[family]
    assert [row for row in report.rows if row.left] == []
    state = model.state_dict().keys()
    unpatch(model)
    assert model.state_dict().keys() == state


@pytest.mark.parametrize("family", tiny_vlms.QWEN)
def test_a_tower_attends_to_all_pictures_in_one_call(family, seen, tokenizer_of, reader_of):
    """And windows of Qwen2.5-VL: the pictures' own lengths reach the attention, not one call for each."""
    from ligertune.attention import image_attention

    model = tiny_vlms.make(family, tokenizer_of(family))
    patch(model)
    forward = type(model.model.visual.blocks[0].attn).forward
    table = (getattr(forward, "__wrapped__", forward)).__globals__["ALL_ATTENTION_FUNCTIONS"]
    assert table.get_interface("sdpa", None) is image_attention.pictures_apart
    with torch.no_grad():
        model(**batch_of(seen(family), reader_of(family), (0, 1, 2, 3)))


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_a_row_of_a_padded_batch_is_as_it_is_alone(family, seen, tokenizer_of, reader_of):
    model, rows = tiny_vlms.make(family, tokenizer_of(family)).eval(), seen(family)
    indices = (0, 1) if family == "mllama" else (0, 1, 2, 3)
    with torch.no_grad():
        together = model(**batch_of(rows, reader_of(family), indices, multiple_of=16)).logits
        for place, index in enumerate(indices):
            alone = model(**batch_of(rows, reader_of(family), (index,))).logits
            length = len(rows.train[index].input_ids)
            torch.testing.assert_close(together[place, :length], alone[0, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_the_image_matters(family, prepared_for, pictures, tokenizer_of, reader_of):
    model = tiny_vlms.make(family, tokenizer_of(family)).eval()
    rows = prepared_for(family, [asked("<image>What is this?", "Yes", pictures[c]) for c in ("red", "green")])
    logits = []
    with torch.no_grad():
        for index in (0, 1):
            logits.append(model(**batch_of(rows, reader_of(family), (index,))).logits[0, -3:])
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("implementation", ["document_attention", "per_document", "sdpa"])
@pytest.mark.parametrize("family", PACKED)
def test_packed_training_equals_that_of_single_documents(
    family, implementation, patched, seen, tokenizer_of, reader_of
):
    model, rows = attending(family, tokenizer_of(family), implementation), seen(family)
    prepare_vision(model, NOTHING_FROZEN)
    if patched:
        patch(model)
    total = int(rows.train.trained.sum())
    single = attending(family, tokenizer_of(family), "sdpa")
    prepare_vision(single, NOTHING_FROZEN)
    single.load_state_dict(model.state_dict())
    loss, gradients = torch.zeros(()), {}
    for index in range(4):
        part, found = training(single, batch_of(rows, reader_of(family), (index,)), num_items_in_batch=total)
        loss += part
        gradients = {name: gradients.get(name, 0) + gradient for name, gradient in found.items()}
    guard(model)
    batch = batch_of(rows, reader_of(family), (0, 1, 2, 3), packed=True, multiple_of=16)
    packed = training(model, batch, num_items_in_batch=total)
    assert_same_training(packed, (loss, gradients), tolerance=5e-5)


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
@pytest.mark.parametrize("frozen", ["vision_tower", "projector", "language_model", "vision_tower projector"])
def test_gradients_are_where_nothing_is_frozen(family, frozen, seen, tokenizer_of, reader_of):
    parts = ("vision_tower", "projector", "language_model")
    spec = VisionOptions(**{f"freeze_{part}": part in frozen.split() for part in parts})
    model = tiny_vlms.make(family, tokenizer_of(family))
    prepare_vision(model, spec)
    patch(model)
    _, gradients = training(model, batch_of(seen(family), reader_of(family), (0, 1)))
    row = family_of(model.config)
    with_gradient = {part_of(row, name) for name, gradient in gradients.items() if gradient.abs().sum() > 0}
    assert with_gradient == set(parts) - set(frozen.split())
    unreached = {name for name, p in model.named_parameters() if p.requires_grad} - gradients.keys()
    assert not unreached  # else ranks would wait for them


def test_all_frozen_is_refused(tokenizer_of):
    model = tiny_vlms.make("llava", tokenizer_of("llava"))
    with pytest.raises(UserError, match="nothing would be trained"):
        prepare_vision(model, VisionOptions(freeze_language_model=True))


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_a_frozen_tower_runs_without_autograd(family, seen, tokenizer_of, reader_of):
    model = tiny_vlms.make(family, tokenizer_of(family))
    prepare_vision(model, VisionOptions())
    outputs = []
    tower = model.get_submodule(family_of(model.config).vision_tower[0].rstrip("."))
    tower.register_forward_hook(lambda module, args, output: outputs.append(output))
    training(model, batch_of(seen(family), reader_of(family), (0, 1)))
    assert len(outputs) == 1 and not outputs[0].last_hidden_state.requires_grad


TEXT_ALONE = [(name, packed) for packed in (False, True) for name in (PACKED if packed else tiny_vlms.FAMILIES)]


@pytest.mark.parametrize(("family", "packed"), TEXT_ALONE)
def test_a_batch_of_text_alone_leaves_the_tower_in_the_graph(family, packed, seen, tokenizer_of, reader_of):
    """Its gradients are there and zero, and the text's are what they are without a picture."""
    rows = seen(family)
    batch = batch_of(rows, reader_of(family), (3,), packed=packed)
    model = attending(family, tokenizer_of(family), "per_document" if packed else "sdpa")
    prepare_vision(model, NOTHING_FROZEN)
    if packed:
        guard(model)
    loss, gradients = training(model, batch)
    row = family_of(model.config)
    seeing = [gradient for name, gradient in gradients.items() if part_of(row, name) != "language_model"]
    assert seeing and not any(gradient.any() for gradient in seeing)
    example = rows.train[3]
    plain = {"input_ids": torch.tensor(example.input_ids[None]).long(), "labels": torch.tensor(example.labels[None])}
    plain["labels"] = plain["labels"].long()
    expected, truth = training(attending(family, tokenizer_of(family), "sdpa"), plain)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, gradient in truth.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", tiny_vlms.TOKENS)
def test_adapters_stand_in_the_language_model_alone(family, tokenizer_of):
    model = tiny_vlms.make(family, tokenizer_of(family))
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=2))
    where = {part_of(family_of(model.config), name.partition("base_model.model.")[2])
             for name, parameter in adapted.named_parameters() if parameter.requires_grad}  # fmt: skip
    assert where == {"language_model"}
