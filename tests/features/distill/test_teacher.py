"""The teacher of a distillation: its vocabulary, memory and what is refused."""

import importlib.util
import json
import shutil

import pytest
import torch
from support.command_line import run_here
from support.quickstart_runs import plan_run
from support.tasks.distill_runs import TEACHER, distil, distill_settings, save_student
from transformers import AutoModelForCausalLM

from ligertune.errors import UserError
from ligertune.features.distill.teacher import compare_vocabularies, offload_layers
from ligertune.models.shape import read_frozen_shape
from ligertune.planning.make_plan import host_memory_parts
from ligertune.planning.memory.states import NF4_BYTES

WORDS = {"a": 0, "b": 1, "c": 2}


def test_equal_vocabularies_give_no_note():
    assert compare_vocabularies("org/large", (WORDS, 4), (WORDS, 4)) == ()


def test_padding_and_further_tokens_are_notes():
    notes = compare_vocabularies("org/large", ({**WORDS, "d": 3}, 8), (WORDS, 4))
    assert notes == (
        "distill: the teacher was not trained on 1 token of the student's tokenizer",
        "distill: the student's output head has 4 more rows than the other's; "
        "they pad the vocabulary and are left out of the divergence",
    )
    assert "the teacher's output head has 1 more row than" in compare_vocabularies("o/l", (WORDS, 3), (WORDS, 4))[0]


def test_another_vocabulary_is_refused():
    with pytest.raises(UserError, match=r"id 1 is 'x' there and 'b' here \(2 ids of 3 differ\)"):
        compare_vocabularies("org/large", (WORDS, 4), ({"a": 0, "x": 1, "b": 2}, 4))
    with pytest.raises(UserError, match="no embedding for id 9 of the student's tokenizer; its last is 3"):
        compare_vocabularies("org/large", ({**WORDS, "d": 9}, 10), (WORDS, 4))


def test_a_teacher_with_fewer_rows_than_its_own_tokenizer_has_ids_is_refused():
    with pytest.raises(UserError, match="no embedding for id 2 of the student's tokenizer; its last is 1") as caught:
        compare_vocabularies("org/large", (WORDS, 4), (WORDS, 2))
    assert caught.value.hint == "Use another teacher."


@pytest.fixture
def other_words(tmp_path):
    """A teacher whose tokenizer has two tokens the other way round."""
    folder = save_student(tmp_path / "teacher")
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    items = list(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
    if isinstance(vocabulary, dict):
        (one, i), (other, j) = items[-2:]
        vocabulary |= {one: j, other: i}
    else:
        items[-2], items[-1] = items[-1], items[-2]
    file.write_text(json.dumps(values), encoding="utf-8")
    return folder


def test_a_teacher_with_other_words_ends_the_command(other_words, tmp_path):
    settings = distill_settings(TEACHER, **{"distill.teacher": other_words})
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = run_here("plan", TEACHER.parent / "stories260k.yaml", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert "has another vocabulary than the student: id" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing/folder/x", "there is no folder"), ("empty", "holds no config.json"), ("no-tokenizer", "no tokenizer")],
)
def test_a_teacher_that_is_not_there_is_one_sentence(path, words, tmp_path):
    (tmp_path / "empty").mkdir()
    save_student(tmp_path / "no-tokenizer")
    for file in (tmp_path / "no-tokenizer").glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match=f"^distill.teacher: .*{words}"):
        plan_run(tmp_path, **distill_settings(TEACHER, **{"distill.teacher": tmp_path / path}))


def test_a_teacher_with_a_state_takes_no_packed_rows(tmp_path):
    folder = tmp_path / "recurrent"
    shutil.copytree(save_student(tmp_path / "student"), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "layer_types": ["indexed_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = r"^distill\.teacher: the teacher takes no packed rows: qwen3 has indexed_attention layers"
    with pytest.raises(UserError, match=words) as no:
        plan_run(tmp_path, **distill_settings(TEACHER, **{"distill.teacher": folder, "data.packing": True}))
    assert no.value.hint == "Write data.packing: false and data.padding_free: false."


def test_a_teacher_that_overflows_ends_the_run_before_its_first_step(tmp_path):
    folder = save_student(tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data.fill_(3e38)
    model.save_pretrained(folder)
    with pytest.raises(UserError, match=r"^distill\.teacher: this LlamaForCausalLM computes NaN or infinity"):
        distil(tmp_path, save_student(tmp_path / "student"), **{"distill.teacher": folder})


def test_the_memory_plan_holds_the_teacher(tmp_path):
    student = save_student(tmp_path / "student")
    job = plan_run(tmp_path, **distill_settings(student))
    peak = job.plan.as_dict()["peak"]
    assert peak["frozen_model"] == job.plan.teacher.shape.weights == 4 * job.plan.teacher.n_parameters
    half = plan_run(tmp_path, **distill_settings(student, **{"distill.teacher_dtype": "bfloat16"})).plan
    assert half.teacher.shape.weights == peak["frozen_model"] // 2
    assert [line.kernel for line in job.plan.kernels if line.applied][-1] == "linear_jsd"
    assert half.loss_in_head and half.memory.policy.fused_loss


def test_offloading_leaves_one_layer_on_the_device(tmp_path):
    job = plan_run(
        tmp_path, **distill_settings(save_student(tmp_path / "student"), **{"distill.teacher_offload": True})
    )
    teacher = job.plan.teacher
    embedding, layers = 512 * 64 * 4, 5
    everything = 4 * teacher.n_parameters
    assert teacher.shape.weights == pytest.approx(embedding + (everything - embedding) / layers, abs=100)
    assert teacher.shape.in_host_memory == everything - embedding
    assert host_memory_parts(job.plan) == {"distill.teacher_offload: true": (teacher.shape.in_host_memory, 0)}


@pytest.mark.gpu
def test_each_layer_comes_to_the_device_for_its_forward_and_leaves_it():
    tokens = torch.tensor([[1, 5, 9]], device="cuda")
    expected = AutoModelForCausalLM.from_pretrained(TEACHER).eval().to("cuda")(tokens).logits
    model = AutoModelForCausalLM.from_pretrained(TEACHER).eval().requires_grad_(False)
    offload_layers(model, torch.device("cuda"))
    seen = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda m, args: seen.append(m.up_proj.weight.device.type))
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=0)
    assert seen == ["cuda"] and {p.device.type for p in model.model.layers.parameters()} == {"cpu"}
    assert model.get_input_embeddings().weight.device.type == "cuda"


def test_four_bits_need_their_package_and_are_counted(tmp_path):
    settings = distill_settings(save_student(tmp_path / "student"), **{"distill.teacher_load_in_4bit": True})
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(UserError, match="teacher_load_in_4bit: true needs the package bitsandbytes"):
            plan_run(tmp_path, **settings)
    model = AutoModelForCausalLM.from_pretrained(TEACHER)
    inside = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    whole, packed = (read_frozen_shape(model, "bfloat16", four_bits=four_bits).weights for four_bits in (False, True))
    assert whole - packed == pytest.approx((2 - NF4_BYTES) * inside, abs=1)
