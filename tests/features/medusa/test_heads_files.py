"""Files of Medusa heads: the exact layout, read back by the rules of each server's loader."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.tiny_models import make
from transformers import AutoTokenizer

from ligertune.errors import UserError
from ligertune.features.medusa.heads import MedusaHeads
from ligertune.features.medusa.heads_files import (
    HeadsConfig,
    ServedModel,
    fingerprint_of,
    read_choices,
    read_heads,
    write_heads,
)

HEADS, LAYERS, HIDDEN, VOCAB = 2, 2, 64, 128
BLOCKS = {
    f"{i}.{j}.linear.{name}": shape
    for i in range(HEADS)
    for j in range(LAYERS)
    for name, shape in (("weight", (HIDDEN, HIDDEN)), ("bias", (HIDDEN,)))
}
PROJECTIONS = {f"{i}.{LAYERS}.weight": (VOCAB, HIDDEN) for i in range(HEADS)}


@pytest.fixture
def weight():
    return make("llama").get_output_embeddings().weight.detach()


@pytest.fixture
def write(quickstart, tmp_path, weight):
    """Write random heads; return (folder, heads)."""

    def go(*, own: bool = False, expand: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Path, MedusaHeads]:
        heads = MedusaHeads(HEADS, LAYERS, weight.to(dtype), own_lm_head=own)
        for parameter in heads.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
        served = ServedModel("some/model", tokenizer, {"prompt_template": "chat", "system_prompt": None})
        folder = tmp_path / "medusa"
        write_heads(heads.state_dict(), weight.to(dtype), folder, served, paths=[(0,), (0, 0)], expand=expand)
        return tmp_path / "medusa", heads

    return go


@pytest.mark.parametrize(
    ("form", "names", "version"),
    [
        ({}, {**BLOCKS, "lm_heads.0.weight": (VOCAB, HIDDEN)}, "2"),
        ({"own": True}, {**BLOCKS, **PROJECTIONS}, "1"),
        ({"expand": True}, {**BLOCKS, **PROJECTIONS}, "1"),
    ],
    ids=["shared", "own", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_names_shapes_and_dtypes(write, form, names, version, dtype):
    folder, _ = write(**form, dtype=dtype)
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == names
    assert {t.dtype for t in tensors.values()} == {dtype}
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "model_type": "medusa",
        "medusa_num_heads": HEADS,
        "medusa_num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "base_model_name_or_path": "some/model",
        "base_model_fingerprint": config["base_model_fingerprint"],
        "original_lm_head": version == "2",
        "medusa_fc_bias": True,
        "version": version,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    assert read_choices(folder, HEADS) == [(0,), (0, 0)]
    assert (folder / "tokenizer.json").is_file()


each_form = pytest.mark.parametrize("form", [{}, {"own": True}, {"expand": True}], ids=["shared", "own", "expanded"])


def as_vllm_loads(folder: Path) -> dict[str, torch.Tensor]:
    """Load as vLLM 0.31 does: it renames keys, drops unknown tensors, and needs every expected one."""
    config = json.loads((folder / "config.json").read_text())
    numbers = {}
    for key, value in config.items():
        if "num" in key and "heads" in key:
            numbers["num_heads"] = value
        elif "num" in key and "layers" in key:
            numbers["num_hidden_layers"] = value
    heads, layers = numbers["num_heads"], numbers["num_hidden_layers"]
    wanted = {f"blocks.{i}.layers.{j}.weight" for i in range(heads) for j in range(layers)}
    if config.get("medusa_fc_bias", False):
        wanted |= {name.replace("weight", "bias") for name in wanted}
    shared = config.get("original_lm_head", False)
    wanted |= {"lm_head.weight"} if shared else {f"lm_heads.{i}.weight" for i in range(heads)}
    found = {}
    for name, tensor in load_file(folder / "medusa_lm_head.safetensors").items():
        name = name.replace("medusa_heads.", "")
        if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
            name = "blocks.{}.layers.{}.{}".format(*match.groups())
        elif match := re.fullmatch(rf"(\d+)\.{layers}\.weight", name):
            name = f"lm_heads.{match[1]}.weight"
        if shared and name == "lm_heads.0.weight":
            name = "lm_head.weight"
        if name in wanted:
            found[name] = tensor
    assert found.keys() == wanted
    return found


@each_form
def test_vllm_computes_what_the_heads_compute(write, weight, form):
    folder, heads = write(**form)
    loaded, hidden = as_vllm_loads(folder), torch.randn(3, HIDDEN)
    blocks, projections = heads.hidden(hidden), heads.projections(weight)
    for i in range(HEADS):
        x = hidden
        for j in range(LAYERS):
            place = f"blocks.{i}.layers.{j}"
            x = x + torch.nn.functional.silu(x @ loaded[f"{place}.weight"].t() + loaded[f"{place}.bias"])
        projection = loaded["lm_head.weight"] if "lm_head.weight" in loaded else loaded[f"lm_heads.{i}.weight"]
        torch.testing.assert_close(x @ projection.t(), blocks[i] @ projections[i].t())


@each_form
def test_read_heads_returns_the_same_heads(write, weight, form):
    folder, heads = write(**form)
    loaded, hidden = read_heads(folder, weight), torch.randn(3, HIDDEN)
    for method, given in (("hidden", hidden), ("projections", weight)):
        for found, expected in zip(getattr(loaded, method)(given), getattr(heads, method)(given), strict=True):
            assert torch.equal(found, expected)
    assert read_heads(folder, weight.bfloat16())[0][0].linear.weight.dtype == torch.bfloat16


def test_heads_of_another_model_are_refused(write, weight):
    folder, _ = write()
    with pytest.raises(UserError, match="hidden size 64 and a vocabulary of 128; this one has 32 and 128"):
        read_heads(folder, weight[:, :32])
    with pytest.raises(UserError, match="this is another model"):
        read_heads(folder, make("llama", seed=1).get_output_embeddings().weight)


def test_files_that_contradict_their_config_are_refused(write, weight):
    folder, _ = write()
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    del tensors["1.0.linear.bias"]
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    with pytest.raises(UserError, match=r"1\.0\.linear\.bias"):
        read_heads(folder, weight)
    (folder / "medusa_lm_head.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match="could not be read"):
        read_heads(folder, weight)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="lacks medusa_num_heads"):
        read_heads(folder, weight)


def test_a_fingerprint_is_of_the_whole_output_head():
    head = torch.randn(100, 64)
    other = torch.cat([head[:50], torch.randn(50, 64)])
    assert fingerprint_of(head) == fingerprint_of(head.bfloat16()) != fingerprint_of(other)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", "null", "[0]", "[[]]", "[[0], [0, 0], [0, 0, 0, 0, 0, 0]]", "[[-1]]", "[[1000000000]]", "[[0.5]]",
        "[[true]]", "[[0, 1]]", "[[0], [1, 0]]", '[["0"]]', "[" * 100_000, json.dumps([[0]] * 5000), f"[[{VOCAB}]]",
        "[[" + "9" * 400 + "]]",
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_tree_that_cannot_be_decoded_with_is_one_sentence(text, write):
    folder, _ = write()
    (folder / "medusa_choices.json").write_text(text)
    with pytest.raises(UserError, match=r"^Medusa heads: .*medusa_choices\.json must hold "):
        read_choices(folder, HEADS)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 10**400}, {"medusa_num_heads": 2**40}, {"hidden_size": True}, {"torch_dtype": 3},
        {"base_model_fingerprint": []}, {"original_lm_head": "yes"}, {"base_model_name_or_path": {}},
    ],
    ids=lambda change: str(change)[:30],
)  # fmt: skip
def test_a_description_of_heads_with_wrong_values_is_one_sentence(change, write):
    folder, _ = write()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=rf"^Medusa heads: .*config\.json.* {next(iter(change))}"):
        HeadsConfig.read(folder)
