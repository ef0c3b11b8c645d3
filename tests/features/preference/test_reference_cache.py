"""Stored reference log-probabilities: what their key depends on."""

from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from support.tasks.answer_truth import answer, batcher_of, pair, plan_of

from ligertune.data.examples import Examples
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.features.preference.reference import PrecomputedReference, ReferenceRows
from ligertune.features.preference.stored_log_probs import StoredLogProbs, log_probs_key, rounding_key
from ligertune.planning.plan import Plan
from ligertune.recipe.schema import RopeParametersSpec

PAIRS = Examples([pair(answer([3, 4, 5, 2], [2, 3]), answer([3, 4, 6, 2], [2, 3]))])
SIZE = 16384  # bytes of a sample


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Plan:
    """A plan whose model is a folder with two files of weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(3 * SIZE))
    return with_model(plan_of(tmp_path_factory.mktemp("plan")), model_name_or_path=str(folder))


def with_model(plan: Plan, **changes: object) -> Plan:
    return with_build(plan, model=plan.build.model.model_copy(update=changes))


def with_build(plan: Plan, **changes: object) -> Plan:
    return replace(plan, build=replace(plan.build, **changes))


def with_method(plan: Plan, **changes: object) -> Plan:
    return with_build(plan, method=plan.build.method.model_copy(update=changes))


def in_folder(plan: Plan, folder: Path) -> Plan:
    return replace(plan, checkpoint=plan.checkpoint.model_copy(update={"output_dir": str(folder)}))


def key(plan: Plan, examples: Examples = PAIRS) -> str:
    return log_probs_key(plan, examples)


def ld(plan: Plan, alpha: float) -> Plan:
    return replace(plan, build=plan.build.with_section(PreferenceSpec, ld_alpha=alpha))


def test_each_part_of_the_key_changes_it(base):
    random = with_model(base, init="random")
    plans = {
        "as it is": base,
        "ld_alpha": ld(base, 0.5),
        "another ld_alpha": ld(base, 0.0),
        "weights": replace(base, precision=replace(base.precision, weights="bfloat16")),
        "autocast": replace(base, precision=replace(base.precision, autocast="bf16")),
        "four bits": with_method(base, type="qlora"),
        "eight bits": with_method(base, load_in_8bit=True),
        "layers": with_model(base, num_hidden_layers=1),
        "rotary embeddings": with_model(base, rope_parameters=RopeParametersSpec(rope_theta=500.0)),
        "random": random,
        "another seed": with_build(random, seed=base.build.seed + 1),
        "adapter from the weights": with_method(base, type="lora", init_lora_weights="pissa"),
        "its rank": with_method(base, type="lora", init_lora_weights="pissa", lora_r=2),
    }
    keys = {name: key(plan) for name, plan in plans.items()}
    assert len(set(keys.values())) == len(plans), keys


def test_what_the_reference_does_not_depend_on_is_no_part_of_the_key(base):
    same = [
        with_build(base, seed=base.build.seed + 1),  # the weights are not random
        replace(base, build=base.build.with_section(PreferenceSpec, beta=0.7, sft_weight=0.1)),
        replace(in_folder(base, Path("elsewhere")), batching=replace(base.batching, eval_batch_size=7)),
        with_method(base, type="lora", lora_r=2),
    ]
    assert {key(plan) for plan in same} == {key(base)}


def test_other_examples_have_another_key(base):
    """As many, of the same lengths: one token differs, one label, or where the pair is cut."""
    (example,) = PAIRS
    ids, labels = example.input_ids.copy(), example.labels.copy()
    ids[2], labels[2] = 9, -100
    others = [example._replace(input_ids=ids), example._replace(labels=labels), example._replace(first_length=3)]
    assert len({key(base, Examples([one])) for one in (example, *others)}) == 4


@pytest.mark.parametrize(
    ("name", "place"),
    [("config.json", 0), ("model.safetensors", 5), ("model.safetensors", 2 * SIZE + 7), ("model.safetensors", -1)],
)
def test_other_bytes_under_the_same_file_name_have_another_key(name, place, base):
    before = key(base)
    path = Path(base.build.model.model_name_or_path) / name
    content = path.read_bytes()
    try:
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert key(base) != before
        path.write_bytes(content + b" ")
        assert key(base) != before
    finally:
        path.write_bytes(content)
    assert key(base) == before


def test_random_weights_depend_on_the_configuration_and_not_on_files_of_weights(base):
    random = with_model(base, init="random")
    before, path = key(random), Path(base.build.model.model_name_or_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(bytes(7))
    assert key(random) == before
    path.write_bytes(content)


def test_models_of_the_hub_differ_by_name_and_commit(base, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("one", "two"):
        for number, revision in enumerate(("main", "v2")):
            commit = f"{name[0]}{number}" * 20
            snapshot = tmp_path / f"models--org--{name}" / "snapshots" / commit
            snapshot.mkdir(parents=True)
            (snapshot / "config.json").write_text("{}", encoding="utf-8")
            refs = tmp_path / f"models--org--{name}" / "refs"
            refs.mkdir(exist_ok=True)
            (refs / revision).write_text(commit, encoding="utf-8")
    plans = [
        with_model(base, model_name_or_path=f"org/{name}", revision=revision)
        for name in ("one", "two")
        for revision in ("main", "v2")
    ]
    assert len({key(plan) for plan in plans}) == 4


def test_numbers_of_one_run_are_not_read_by_one_with_another_ld_alpha(base, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    values = np.array([[-3.0, -4.0]], dtype=np.float32)
    StoredLogProbs(in_folder(base, tmp_path / "first"), PAIRS).save(values)
    same = in_folder(base, tmp_path / "second")
    assert np.array_equal(StoredLogProbs(same, PAIRS).load(), values)
    assert StoredLogProbs(ld(same, 0.5), PAIRS).load() is None
    assert StoredLogProbs(same, Examples([*PAIRS, *PAIRS])).load() is None


def test_what_decides_the_rounding_is_in_the_name_of_the_file(base):
    """Batches and kernels: a cached reference of others would not be the bits of the first policy."""
    batching = base.batching
    plans = [
        base,
        replace(base, batching=replace(batching, micro_batch_size=1)),
        replace(base, batching=replace(batching, accumulation=7)),
        replace(base, batching=replace(batching, eval_batch_size=7)),
        replace(base, batching=replace(batching, world_size=2)),
        replace(base, rows=replace(base.rows, padding_free=not base.rows.padding_free)),
        replace(base, attn_implementation="eager"),
        with_build(base, seed=base.build.seed + 1),
        with_method(base, type="lora"),
        with_method(base, type="lora", lora_r=2),
    ]
    assert len({rounding_key(plan) for plan in plans}) == len(plans)
    same = [in_folder(base, Path("elsewhere")), ld(base, 0.7), with_build(base, task="dpo")]
    assert {rounding_key(plan) for plan in same} == {rounding_key(base)}


def test_a_run_resumed_with_other_batches_keeps_its_reference(base, tmp_path, monkeypatch):
    """A full run has no initial weights to compute it with. Its numbers do not enter the cache of the other batches."""
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    plan = in_folder(base, tmp_path / "run")
    values = np.array([[-3.0, -4.0]], dtype=np.float32)
    StoredLogProbs(plan, PAIRS).save(values)
    other = replace(plan, batching=replace(plan.batching, micro_batch_size=7))
    assert StoredLogProbs(other, PAIRS).load() is None
    reference = PrecomputedReference(other)
    rows = ReferenceRows(batcher_of(PAIRS, packed=False), None)
    reference.prepare(torch.nn.Linear(1, 1), [rows], resumed=True, say=lambda words: None)
    assert reference.fields(PAIRS, [0])["reference_log_probs"].tolist() == [-3.0, -4.0]
    assert StoredLogProbs(other, PAIRS).load() is None
    assert StoredLogProbs(ld(other, 0.7), PAIRS).load_of_other_batches() is None
