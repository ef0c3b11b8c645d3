"""The teacher of a distillation: its vocabulary, memory and what is refused."""

import json
import shutil

import pytest
from command_line import run_here
from distill_runs import TEACHER, distill_settings, save_student
from quickstart_runs import plan_run

from ligertune.errors import UserError
from ligertune.tasks.distill.teacher import compare_vocabularies

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
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = r"^distill\.teacher: the teacher takes no packed rows: qwen3 has linear_attention layers"
    with pytest.raises(UserError, match=words) as no:
        plan_run(tmp_path, **distill_settings(TEACHER, **{"distill.teacher": folder, "data.packing": True}))
    assert no.value.hint == "Write data.packing: false and data.padding_free: false."


def test_the_memory_plan_holds_the_teacher(tmp_path):
    student = save_student(tmp_path / "student")
    job = plan_run(tmp_path, **distill_settings(student))
    peak = job.plan.as_dict()["peak"]
    assert peak["frozen_model"] == job.plan.teacher.shape.weights == 4 * job.plan.teacher.n_parameters
    half = plan_run(tmp_path, **distill_settings(student, **{"distill.teacher_dtype": "bfloat16"})).plan
    assert half.teacher.shape.weights == peak["frozen_model"] // 2
    assert [line.kernel for line in job.plan.kernels if line.applied][-1] == "linear_jsd"
    assert half.loss_in_head and half.memory.policy.fused_loss
