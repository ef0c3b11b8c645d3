"""Files of draft heads: the exact layouts, the numbers of the package speculators, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.models.tiny_models import config_of, make
from support.tasks.draft_heads import STEPS, fill, known_head, known_rows, logits_of_steps, spaced_ids
from transformers import AutoConfig

from ligertune.errors import UserError
from ligertune.features.draft.draft_config import check_layer_ids, default_layer_ids, draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.files.draft_check import check_draft_head, check_written_head
from ligertune.features.draft.files.draft_files import DraftTarget, read_draft_files, read_draft_head, write_draft_head
from ligertune.features.draft.target_states import StateCapture

E, F, V, D, QUERIES, KEYS = 64, 96, 128, 40, 64, 32  # sizes of the tiny Llama, and a draft vocabulary
RAW = {
    "fc.weight": (E, 3 * E),
    "midlayer.self_attn.q_proj.weight": (QUERIES, 2 * E),
    "midlayer.self_attn.k_proj.weight": (KEYS, 2 * E),
    "midlayer.self_attn.v_proj.weight": (KEYS, 2 * E),
    "midlayer.self_attn.o_proj.weight": (E, QUERIES),
    "midlayer.mlp.gate_proj.weight": (F, E),
    "midlayer.mlp.up_proj.weight": (F, E),
    "midlayer.mlp.down_proj.weight": (E, F),
    "midlayer.input_layernorm.weight": (E,),
    "midlayer.hidden_norm.weight": (E,),
    "midlayer.post_attention_layernorm.weight": (E,),
    "norm.weight": (E,),
    "lm_head.weight": (D, E),
    "d2t": (D,),
    "t2d": (V,),
}
SPECULATORS = {name.replace("midlayer.", "layers.0."): shape for name, shape in RAW.items()}
SPECULATORS["embed_tokens.weight"] = (V, E)
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEXT = list(range(3, 30))


@pytest.fixture
def target():
    model = make("llama", num_hidden_layers=8, rope_parameters=LLAMA_3, architectures=["LlamaForCausalLM"])
    return model.eval()


@pytest.fixture
def write(tmp_path, target):
    """Write a head with random weights; return (folder, head)."""

    def go(layout: str = "eagle3", *, dtype: torch.dtype = torch.float32, **options: object) -> tuple[Path, DraftHead]:
        config = draft_config_of(target.config, **{"draft_vocab_size": D, **options})
        head = DraftHead(config, spaced_ids(config) if config.reduces_vocabulary else None).to(dtype)
        described = DraftTarget("some/model", target.config, target.get_input_embeddings().weight)
        write_draft_head(head, tmp_path / layout, described, layout=layout, speculative_tokens=3)
        return tmp_path / layout, head

    return go


def change(folder: Path, **values: object) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    found = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def change_tensors(folder: Path, *, without: str = "", **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    found = {name: one for name, one in {**load_file(path), **tensors}.items() if name != without}
    save_file(found, path, metadata=metadata)


@pytest.mark.parametrize(("layout", "names"), [("eagle3", RAW), ("speculators", SPECULATORS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_names_shapes_and_dtypes(write, target, layout, names, dtype):
    folder, _ = write(layout, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(one.shape) for name, one in tensors.items()} == names
    tables = {"d2t": torch.int64, "t2d": torch.bool}
    assert {name: one.dtype for name, one in tensors.items()} == {name: tables.get(name, dtype) for name in names}
    # d2t holds differences, and t2d marks the ids that they lead to
    ids = torch.arange(D) + tensors["d2t"]
    assert ids.tolist() == list(range(0, 3 * D, 3))
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == ids.tolist()
    if layout == "speculators":
        assert torch.equal(tensors["embed_tokens.weight"], target.get_input_embeddings().weight.to(dtype))


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_without_vocabulary_reduction_there_are_no_tables(write, target, layout):
    folder, head = write(layout, draft_vocab_size=V)
    tensors = load_file(folder / "model.safetensors")
    assert not {"d2t", "t2d"} & set(tensors)
    assert tensors["lm_head.weight"].shape == (V, E)
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == V
    assert check_draft_head(folder, target, head, TEXT).coverage == 1.0


def test_the_configuration_of_eagle_3(write):
    folder, _ = write()
    layers = {
        "model_type": "llama",
        "hidden_size": E,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_parameters": LLAMA_3,
        "rope_theta": 5e5,
        "rope_scaling": {name: value for name, value in LLAMA_3.items() if name != "rope_theta"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": V,
    }
    ids = {"draft_vocab_size": D, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layers,
        **ids,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    folder, _ = write("speculators")
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
        **ids,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def test_sglang_counts_outputs_of_layers(write):
    """It reads ids from eagle_config, and captures the input of the layer after each."""
    folder, _ = write(layer_ids=(1, 4, 7))
    values = json.loads((folder / "config.json").read_text())
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert values["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}


@pytest.mark.parametrize("left_out", [("rope_parameters",), ("rope_theta", "rope_scaling")], ids=["old", "new"])
def test_old_and_new_keys_describe_the_rotary_embeddings_of_the_target(write, target, left_out):
    folder, _ = write()
    change(folder, **dict.fromkeys(left_out), architectures=["LlamaForCausalLM"])
    assert AutoConfig.from_pretrained(folder).rope_parameters == target.config.rope_parameters


def test_speculators_computes_our_logits():
    """The recorded logits are those of the package for our files: support/tasks/draft_heads.py made them."""
    record = json.loads(Path(__file__).with_name("speculators_logits.json").read_text())
    head, target = known_head()
    assert head.draft_ids().tolist() == record["draft_ids"]
    ids, states = known_rows()
    with torch.no_grad():
        found = logits_of_steps(head, target.embedding, ids, states, STEPS)
    assert [one.shape for one in found] == [(11, 16), (10, 16), (9, 16)]
    for step, logits in enumerate(found):
        expected = torch.tensor(record["logits"][step])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0, msg=f"step {step}")


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_written_head_is_read_back_bit_for_bit(write, target, layout, num_layers):
    folder, head = write(layout, num_layers=num_layers, dtype=torch.bfloat16)
    found = read_draft_head(folder, target.config)
    assert found.config == head.config
    expected = head.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.state_dict().items())
    checked = check_draft_head(folder, target, head, TEXT)
    assert (checked.layout, checked.tokens, checked.coverage) == (layout, len(TEXT) - 1, D / V)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_files_that_servers_would_load_wrongly_are_refused(write, target, layout):
    """Servers skip what they do not know and assume what is missing: acceptance falls without an error."""
    prefix = "midlayer." if layout == "eagle3" else "layers.0."
    for changes, message in (
        ({"without": f"{prefix}hidden_norm.weight"}, "lacks midlayer.hidden_norm.weight"),
        ({"without": "fc.weight"}, "lacks fc.weight"),
        ({"without": "d2t"}, "lacks d2t, and the head drafts 40 of 128 tokens"),
        ({"without": "t2d"}, "lacks t2d"),
        ({"fc_norm.weight": torch.ones(E)}, "holds fc_norm.weight, which this head does not have"),
        ({"fc.weight": torch.ones(E, 2 * E)}, r"fc.weight is \[64, 128\], and config.json asks for \[64, 192\]"),
        ({"d2t": torch.arange(D) * 2 + 1}, "do not describe the same 40 tokens"),
        ({"d2t": torch.arange(D)}, "do not describe the same 40 tokens"),
    ):
        folder, head = write(layout)
        change_tensors(folder, **changes)
        with pytest.raises(UserError, match=message) as caught:
            check_draft_head(folder, target, head, TEXT)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "files alone"])
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_layer_ids_off_by_one_are_refused(write, target, layout, trained):
    """Shapes are right and every server loads such a file: the ids are compared with those of the training."""
    folder, head = write(layout)
    change(folder, eagle_aux_hidden_state_layer_ids=[3, 5, 6])
    with pytest.raises(UserError, match=r"reads the layers \[3, 5, 6\] .* trained on \[2, 4, 5\]") as caught:
        check_draft_head(folder, target, head if trained else None, TEXT)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 2048}, "max_position_embeddings is 2048, and that of the target 256"),
        ({"rope_parameters": {**LLAMA_3, "factor": 2.0}, "rope_scaling": None}, "its rotary embeddings"),
        ({"norm_output": True}, "norm_output is set, and plain EAGLE-3 heads do not have it"),
        ({"norm_before_residual": True}, "norm_before_residual is set"),
        ({"vocab_size": 256}, "drafts for a model with vocab_size 256, and this one has 128"),
        ({"hidden_size": 32}, "hidden_size 32, and this one has 64"),
        ({"draft_vocab_size": 200}, "draft_vocab_size is 200, and must be from 1"),
        ({"draft_vocab_size": None}, "draft_vocab_size is null"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_hidden_layers": 4000}, "num_hidden_layers is 4000, and must be from 1 to 64"),
        ({"rope_parameters": 7, "rope_scaling": None}, "config.json cannot be used"),
        ({"rope_parameters": {"full_attention": 7}, "rope_scaling": None}, "config.json cannot be used"),
        ({"rms_norm_eps": "small"}, "config.json cannot be used"),
        ({"architectures": ["LlamaForCausalLM"]}, "describes no EAGLE-3 head"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, "different layers in rising order"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "3 layers of the target, from 0 to 7"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "must be a list"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(write, target, changes, message):
    folder, head = write()
    change(folder, **changes)
    with pytest.raises(UserError, match=message) as caught:
        check_draft_head(folder, target, head, TEXT)
    assert caught.value.exit_code == 2


def test_other_weights_and_another_embedding_are_found(write, target):
    folder, head = write()
    other = load_file(folder / "model.safetensors")["midlayer.mlp.up_proj.weight"]
    other[0, 0] += 0.5
    change_tensors(folder, **{"midlayer.mlp.up_proj.weight": other})
    with pytest.raises(UserError, match="differ from the trained ones by up to") as caught:
        check_draft_head(folder, target, head, TEXT)
    assert caught.value.exit_code == 1
    folder, head = write("speculators")
    fill(target.get_input_embeddings())
    with pytest.raises(UserError, match=r"embed_tokens.weight is not the embedding of the target"):
        check_draft_head(folder, target, head, TEXT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_one_changed_bit_of_a_written_head_is_found(write, target, layout, dtype):
    described = DraftTarget("some/model", target.config, target.get_input_embeddings().weight)
    folder, head = write(layout, dtype=dtype)
    check_written_head(folder, head, described)
    last = int(head.draft_ids()[-1])
    table = head.d2t.clone()
    table[-1] += 1
    marks = head.t2d.clone()
    marks[last : last + 2] = torch.tensor([False, True])  # the token after it instead
    name = next(name for name in load_file(folder / "model.safetensors") if name.endswith("mlp.up_proj.weight"))
    other = load_file(folder / "model.safetensors")[name]
    other.view(torch.int32 if dtype is torch.float32 else torch.int16)[0, 0] ^= 1
    for changes, message in (({name: other}, "mlp.up_proj.weight"), ({"d2t": table, "t2d": marks}, "d2t")):
        folder, head = write(layout, dtype=dtype)
        change_tensors(folder, **changes)
        with pytest.raises(UserError, match=f"{message} is not that of the trained draft head") as caught:
            check_written_head(folder, head, described)
        assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]},
        {"rms_norm_eps": 1e-5},
        {"max_position_embeddings": 128},
        {"rope_parameters": {**LLAMA_3, "factor": 2.0}, "rope_scaling": None},
    ],
)
def test_a_written_configuration_is_compared_with_the_trained_head(write, target, changes):
    folder, head = write()
    change(folder, **changes)
    described = DraftTarget("some/model", target.config, target.get_input_embeddings().weight)
    with pytest.raises(UserError, match=r"config.json is not that of the trained draft head"):
        check_written_head(folder, head, described)


def test_a_folder_without_a_head_and_a_damaged_one(write, target, tmp_path):
    with pytest.raises(UserError, match="holds no draft head"):
        read_draft_files(tmp_path, target.config)
    folder, _ = write()
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="not a complete safetensors file"):
        read_draft_files(folder, target.config)


@pytest.mark.parametrize(
    ("depth", "ids"), [(32, (2, 16, 29)), (36, (2, 18, 33)), (7, (2, 3, 4)), (5, (1, 2, 3)), (3, (0, 1, 2))]
)
def test_default_layer_ids_are_distinct(depth, ids):
    assert default_layer_ids(depth) == ids
    assert check_layer_ids(ids, depth) == ids


def test_targets_that_have_no_draft_head():
    for changes, message in (
        ({"num_hidden_layers": 2}, "has 2 layers, and a draft head reads the inputs of 3"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
    ):
        with pytest.raises(UserError, match=message):
            draft_config_of(config_of("llama", **{"num_hidden_layers": 8, **changes}))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "olmo2"])
def test_captured_states_enter_the_layers(family):
    model = make(family, num_hidden_layers=5).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad(), StateCapture(model, (0, 2, 4)) as capture:
        every = model(input_ids=ids, output_hidden_states=True).hidden_states
        found = capture.take()
    assert torch.equal(found, torch.cat([every[0], every[2], every[4]], dim=-1))


def test_the_card_says_how_servers_start(write):
    folder, _ = write()
    card = (folder / "README.md").read_text()
    assert "base_model: some/model" in card
    assert "| Reads the inputs of the target's layers | 2, 4, 5 |" in card
    assert "| Draft vocabulary | 40 of 128 tokens (31%) |" in card
    options = '{"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3}'
    assert f"vllm serve some/model --speculative-config '{options}'" in card
    sglang = (
        "python -m sglang.launch_server --model-path some/model --speculative-algorithm EAGLE3"
        " --speculative-draft-model-path eagle3 --speculative-num-steps 3 --speculative-eagle-topk 1"
        " --speculative-num-draft-tokens 4\n"
    )
    assert sglang in card
    convert = "convert_hf_to_gguf.py eagle3 --outtype bf16 --target-model-dir some/model --outfile draft.gguf"
    assert f"{convert} && llama-server -m target.gguf -md draft.gguf --spec-type draft-eagle3" in card
    folder, _ = write("speculators")
    card = (folder / "README.md").read_text()
    assert "vllm serve" in card
    assert "sglang" not in card  # which loads the other layout only
    folder, _ = write(num_layers=2)
    assert "sglang" not in (folder / "README.md").read_text()  # its further layers are other ones
