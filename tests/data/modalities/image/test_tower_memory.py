"""Memory of vision tower and projector: saved activations against the plan."""

import pytest
import torch
from support.covering import every_pair
from support.data.image_batches import batch_of, training
from support.models import tiny_vlms
from transformers import AutoConfig, AutoModelForImageTextToText

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.data.modalities.image.families import family_of, freeze_parts, part_of, prepare_vision
from ligertune.data.modalities.image.recipe import VisionSpec
from ligertune.data.statistics import largest_file_share
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import ActivationPolicy
from ligertune.planning.memory.estimate import tower_bytes
from ligertune.planning.options import MethodOptions


def tower_of(corpus, name: str, **vision: bool):
    config = AutoConfig.from_pretrained(corpus / "model_configs" / name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    freeze_parts(model, family_of(config), VisionSpec(**vision))
    return read_shape(model).tower


@pytest.mark.corpus
def test_a_trained_tower_saves_its_layers_activations(corpus):
    tower = tower_of(corpus, "Qwen2-VL-2B-Instruct", freeze_vision_tower=False)
    assert (tower.layers, tower.hidden, tower.patches_per_token) == (32, 1280, 4)
    # 10 x 1280 around attention (q and k before and after rotation) and norms, 3 x 5120 in an MLP with a quick GELU
    # inputs of a norm and the first product (4 patches per token), input and output of the activation
    projector = 1000 * 4 * 5120 * 2
    assert tower_bytes(tower, 1000, ActivationPolicy(), 2) == projector + 32 * 4000 * 28_160 * 2
    assert tower_bytes(tower, 1000, ActivationPolicy(checkpointing=True), 2) == projector + 32 * 4000 * 1280 * 2
    assert tower_bytes(tower, 1000, ActivationPolicy(checkpointing="offload"), 2) == projector
    frozen = tower_of(corpus, "Qwen2-VL-2B-Instruct")
    assert not frozen.trains and tower_bytes(frozen, 1000, ActivationPolicy(), 2) == 0
    tower = tower_of(corpus, "llava-1.5-7b-hf", freeze_vision_tower=False)
    assert (tower.layers, tower.hidden, tower.patches_per_token) == (24, 1024, 1)
    assert tower_of(corpus, "Llama-3.2-11B-Vision", freeze_vision_tower=False) is None  # tiles are not in the text


def test_the_largest_share_of_image_tokens_is_that_of_the_data(four_rows, reader_of):
    examples, reader = four_rows("qwen2_vl").train, reader_of("qwen2_vl")
    shares = [float((example.input_ids == reader.token_id).mean()) for example in examples]
    assert 0 < max(shares) < 1 and largest_file_share(examples, reader.token_id) == max(shares)
    assert largest_file_share(examples.select([shares.index(0.0)]), reader.token_id) == 0.0


@pytest.mark.parametrize("family", [name for name in tiny_vlms.FAMILIES if name != "mllama"])
def test_a_trained_projector_saves_what_the_plan_predicts(family, four_rows, reader_of, tokenizer_of):
    batch = batch_of(four_rows(family), reader_of(family), (0,))
    kept, towers = [], []
    for frozen in (True, False):
        model = tiny_vlms.make(family, tokenizer_of(family))
        patch(model)
        prepare_vision(model, VisionSpec(freeze_projector=frozen))
        towers.append(read_shape(model).tower)
        kept.append(saved_bytes(model, batch))
    tokens = int((batch["input_ids"] == reader_of(family).token_id).sum())
    counted = [tower_bytes(tower, tokens, ActivationPolicy(), 4) for tower in towers]
    assert counted[0] == 0 < counted[1]
    assert counted[1] <= kept[1] - kept[0] <= 1.02 * counted[1]  # norms save one or two numbers per row


def saved_bytes(model: torch.nn.Module, batch: dict) -> int:
    """Return the bytes that autograd saves in a forward, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in own)


@pytest.mark.parametrize(
    "family, kind, method",
    every_pair(tuple(tiny_vlms.FAMILIES), [True, "offload", "offload_gate", "offload_both"], ["full", "lora"]),
)
def test_checkpointing_runs_a_frozen_tower_once(family, kind, method, four_rows, reader_of, tokenizer_of):
    model = tiny_vlms.make(family, tokenizer_of(family))
    patch(model)
    prepare_vision(model, VisionSpec())
    checkpoint_layers(model, kind)
    trained = apply_method(model, MethodOptions(type=method))
    runs = {name: [] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, module in model.named_modules():
        if name in runs:
            module.register_forward_hook(lambda *given, name=name: runs[name].append(given[2].requires_grad))
    training(trained, batch_of(four_rows(family), reader_of(family), (0,)))
    seen, read = ([runs[name] for name in runs if part_of(family_of(model.config), name) == part and runs[name]]
                  for part in ("vision_tower", "language_model"))  # fmt: skip
    assert seen and all(found == [False] for found in seen)
    assert [True, True] in read
