"""Runs of task: distill: keys, batch layouts, resuming, ranks, model families, and learning."""

import pytest
import torch
from support.command_line import metrics
from support.forked_ranks import on_ranks
from support.models.tiny_models import config_of, random_model
from support.quickstart_runs import RESUME, plan_run, saves, train, unfinished
from support.rerun_interpreted import rerun_interpreted
from support.tasks.distill_runs import TEACHER, distil, distill_settings, save_student, values
from transformers import AutoModelForCausalLM, AutoTokenizer

from ligertune.features.distill.teacher import teacher_options

KEYS = {
    "distill.loss": "reverse_kl",
    "distill.beta": 0.1,
    "distill.temperature": 2.0,
    "distill.sft_weight": 0.5,
    "distill.teacher_dtype": "bfloat16",
}
EVALUATES = {"eval.eval_strategy": "steps", "eval.eval_steps": 3}
MODEL = {"checkpoint.save_model": True}
ONE_LINE = {"train.max_steps": 1, "train.learning_rate": 1e-12}


SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_student(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def usual(student, tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual")
    train(folder, **distill_settings(student, **EVALUATES, **MODEL))
    return folder


@pytest.fixture
def usual_lines(usual):
    return metrics(usual / "run")


def test_kl_is_logged_and_is_the_loss_without_the_cross_entropy(usual_lines):
    assert values(usual_lines, "kl") == pytest.approx(values(usual_lines), rel=1e-5)
    assert len(values(usual_lines)) == 3
    assert values(usual_lines, "eval_kl") == pytest.approx(values(usual_lines, "eval_loss"), rel=1e-5)
    assert values(usual_lines, "sft_loss") == []


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_its_effect(key, student, usual_lines, tmp_path):
    lines = distil(tmp_path, student, **ONE_LINE, **{key: KEYS[key]})
    assert values(lines)[0] != pytest.approx(values(usual_lines)[0], rel=1e-6)
    if key == "distill.sft_weight":
        kl, sft = values(lines, "kl")[0], values(lines, "sft_loss")[0]
        assert values(lines)[0] == pytest.approx((kl + sft) / 2, rel=1e-5)
        assert kl == pytest.approx(values(usual_lines)[0], rel=1e-5)


def test_the_revision_is_that_of_the_teacher(student, tmp_path):
    plan = plan_run(
        tmp_path, **distill_settings(student, **{"distill.teacher_revision": "step-5", "model.revision": "other"})
    ).plan
    spec = teacher_options(plan.build, "auto")
    assert (spec.revision, spec.model_name_or_path, spec.init) == ("step-5", str(TEACHER), "pretrained")


LAYOUTS = {
    "one row at a time": {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 4},
    "without padding": {"data.padding_free": True},
    "without kernels": {"kernels.enabled": False},
    "logits": {"kernels.loss": "torch"},
    "teacher offloaded": {"distill.teacher_offload": True},
    "checkpointed": {"train.gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name.startswith("without") else SLOW) for name in LAYOUTS]
)
def test_losses_do_not_depend_on_how_a_step_is_computed(layout, student, usual_lines, tmp_path):
    lines = distil(tmp_path, student, **EVALUATES, **LAYOUTS[layout])
    for key in ("loss", "grad_norm", "eval_loss", "eval_kl"):
        assert values(lines, key) == pytest.approx(values(usual_lines, key), rel=2e-5), key


@SLOW
def test_packed_rows_have_the_loss_of_single_examples(student, tmp_path):
    found = []
    for packing in (True, False):
        changes = {"data.packing": packing, "eval.eval_strategy": "epoch"}
        found.append(distil(tmp_path / str(packing), student, **ONE_LINE, **changes))
    for key in ("eval_loss", "eval_kl"):
        assert values(found[0], key) == pytest.approx(values(found[1], key), rel=1e-5)


@SLOW
def test_the_divergence_of_a_model_from_itself_is_zero(tmp_path):
    assert abs(values(distil(tmp_path, TEACHER, **ONE_LINE))[0]) < 1e-6


def test_a_resumed_run_is_bit_equal(student, usual, tmp_path):
    changes = distill_settings(student, **EVALUATES, **MODEL, **saves(2))
    train(tmp_path, **changes)
    unfinished(tmp_path)
    assert train(tmp_path, **changes, **RESUME).resumed_from == 2
    weights = [(folder / "run" / "model" / "model.safetensors").read_bytes() for folder in (tmp_path, usual)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=SLOW)])
def test_ranks_train_as_one_process(strategy, student, usual_lines, tmp_path):
    changes = distill_settings(
        student, **{"parallel.strategy": strategy, "train.gradient_accumulation_steps": 1}, **EVALUATES
    )
    on_ranks(2, lambda rank: train(tmp_path, **changes) and None)
    lines = metrics(tmp_path / "run")
    for key in ("loss", "kl", "grad_norm", "eval_loss"):
        assert values(lines, key) == pytest.approx(values(usual_lines, key), rel=1e-5), key


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=SLOW) for name in ("granite", "cohere2", "llama_tied"))]
)
def test_families_whose_logits_are_scaled_or_capped(family, tmp_path):
    paths = {}
    for name, seed, changes in (("student", 0, {}), ("teacher", 1, {"hidden_size": 96})):
        config = config_of(family, vocab_size=512, max_position_embeddings=512, **changes)
        paths[name] = tmp_path / name
        random_model(AutoModelForCausalLM, config, seed=seed).save_pretrained(paths[name])
        AutoTokenizer.from_pretrained(TEACHER).save_pretrained(paths[name])
    found = []
    for enabled in ("auto", False):
        changes = {"distill.teacher": paths["teacher"], "train.max_steps": 2, "kernels.enabled": enabled}
        found.append(distil(tmp_path / str(enabled), paths["student"], **changes))
    assert values(found[0]) == pytest.approx(values(found[1]), rel=2e-5)
    notes = [line["note"] for line in found[0] if "note" in line]
    assert [note.startswith("distill: linear_jsd has no soft cap") for note in notes] == [True] * (family == "gemma2")
    assert values(found[0], "grad_norm") == pytest.approx(values(found[1], "grad_norm"), rel=1e-4)


@SLOW
def test_a_run_with_interpreted_kernels_is_one_without():
    rerun_interpreted(__file__, "-k", "capped and gemma2")


def test_padding_of_the_vocabulary_is_left_out(tmp_path):
    longer = save_student(tmp_path / "longer", vocab_size=576)
    with torch.no_grad():  # the padding would be the most probable
        model = AutoModelForCausalLM.from_pretrained(longer)
        model.get_output_embeddings().weight[512:] *= 100
        model.save_pretrained(longer)
    lines = distil(tmp_path, longer, **ONE_LINE)
    assert 0.0 < values(lines)[0] < 0.7
    report = (tmp_path / "run" / "report.json").read_text(encoding="utf-8")
    assert "the student's output head has 64 more rows than the other's" in report


@pytest.mark.parametrize(
    "method",
    [
        {"method.type": "lora", "method.lora_r": 4},
        pytest.param({"method.type": "freeze", "method.trainable": "[layers.1]"}, marks=SLOW),
        pytest.param({"train.gradient_checkpointing": "offload"}, marks=SLOW),
    ],
    ids=["lora", "freeze", "offload"],
)
def test_methods_train(method, student, tmp_path):
    one_batch = {"data.datasets.0.max_samples": 4, "data.val_split": 0}
    lines = distil(tmp_path, student, **method, **one_batch, **{"train.learning_rate": 1e-2})
    assert values(lines)[-1] < values(lines)[0]


@SLOW
def test_streamed_data_train(student, tmp_path):
    lines = distil(tmp_path, student, **{"data.streaming": True, "data.val_split": 0})
    assert len(values(lines, "kl")) == 3


@SLOW
def test_the_student_halves_its_kl_to_the_teacher(student, tmp_path):
    changes = {"train.max_steps": 120, "train.learning_rate": 1e-2, "data.datasets.0.max_samples": 400}
    changes |= {"data.packing": True, "distill.loss": "forward_kl", "logging.logging_steps": 10}
    lines = distil(tmp_path, student, **changes)
    assert values(lines, "kl")[-1] < values(lines, "loss_before_training")[0] / 2
