"""Reference log-probabilities: mode, ranks, order, adapters, and the key under which they are stored."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.forked_ranks import on_ranks
from support.models.tiny_models import make
from support.quickstart_runs import plan_run
from support.tasks.preference_runs import pairs, settings

from ligertune.data.batching.collate import Batcher
from ligertune.data.cache import cache_home
from ligertune.data.examples import Example, Examples
from ligertune.errors import UserError
from ligertune.features.preference.answers import answer_fields
from ligertune.features.preference.kto_task import KtoTask
from ligertune.features.preference.preference_task import PreferenceTask
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.features.preference.reference import (
    AdapterReference,
    CopiedReference,
    PrecomputedReference,
    ReferenceRows,
    choose_reference,
    precompute,
    rank_batches,
    without_adapter,
)
from ligertune.features.preference.stored_log_probs import FOLDER, StoredLogProbs, log_probs_key
from ligertune.models.shape import base_of
from ligertune.models.trainable import apply_method
from ligertune.patching.deferred_logits import loss_only
from ligertune.patching.fused_loss import let_head_losses_run
from ligertune.planning.options import MethodOptions
from ligertune.planning.plan import Plan
from ligertune.planning.precision import Precision

X, CPU = -100, torch.device("cpu")
LORA = MethodOptions(type="lora", lora_r=4, lora_dropout=0.5, lora_target_modules=["q_proj", "v_proj"])


def silent(words: str) -> None:
    """Show no progress."""


def tiny(*, adapted: bool = False) -> torch.nn.Module:
    """Return a model in training mode with dropout; `adapted`: with a trained adapter."""
    model = make("llama", attention_dropout=0.5)
    if adapted:
        model = apply_method(model, LORA)
        with torch.random.fork_rng():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.3)
    let_head_losses_run(base_of(model), "dpo")
    return model.train()


def some_pairs(count: int = 5) -> Examples:
    """Return pairs of different lengths; the longest is in the middle."""
    generator, made = np.random.default_rng(0), []
    for number in range(count):
        sizes = 4 + (3 * number) % 7, 5 + (2 * number) % 5
        ids = generator.integers(3, 128, sum(sizes)).astype(np.int32)
        labels = ids.copy()
        labels[:2] = labels[sizes[0] : sizes[0] + 2] = X
        made.append(Example(ids, labels, "a:1", (), sizes[0]))
    return Examples(made)


@torch.no_grad()
def by_hand(examples: Examples, model: torch.nn.Module | None = None) -> np.ndarray:
    """Return the log-probabilities of both answers of each pair (N, 2), of transformers' model without dropout."""
    model, found = model or make("llama").eval(), []
    for example in examples:
        for document in example.documents():
            ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in document[:2])
            log_probs = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
            kept = labels[1:] != X
            found.append(float(log_probs.gather(1, ids[1:, None])[kept].sum()))
    return np.array(found).reshape(len(examples), -1)


def plan_of(size: int = 2, **preference: object) -> Any:
    """Return what the references read of a plan, for padded rows."""
    return SimpleNamespace(
        build=SimpleNamespace(section=lambda kind: PreferenceSpec(**preference), method=MethodOptions(type="full")),
        batching=SimpleNamespace(eval_batch_size=size, micro_batch_size=size, global_batch_size=4),
        rows=SimpleNamespace(packed=False, length=64),
        data_options=SimpleNamespace(max_length=64),
        precision=SimpleNamespace(autocast="no"),
        shares_weights=False,
    )


def batcher_of(examples: Examples, more_fields: Callable | None = None) -> Batcher:
    def fields(examples: Examples, indices: list[int], batch: dict[str, Any]) -> dict[str, Any]:
        return answer_fields(batch, 2 * len(indices))

    return Batcher(examples, False, 1, 0, False, CPU, more_fields=more_fields or fields)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_precomputed_log_probabilities_are_those_of_each_pair_without_dropout_or_adapter(adapted, is_training):
    """The model keeps its mode, and its adapter trains afterwards."""
    model, examples = tiny(adapted=adapted).train(is_training), some_pairs()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = precompute(plan_of(), model, ReferenceRows(batcher_of(examples), None), silent)
    np.testing.assert_allclose(found, by_hand(examples), rtol=1e-5)
    assert found.dtype == np.float32 and all(module.training is is_training for module in model.modules())
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained


def test_the_reference_of_an_adapter_is_the_model_without_it():
    model, examples = tiny(adapted=True).eval(), some_pairs()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    rows = [np.array([index]) for index in (3, 1)]
    with without_adapter(model):  # FSDP2 keeps what it sees in its first forward
        assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with loss_only():
        found = AdapterReference().log_probs(model, batcher_of(examples)(rows))
    np.testing.assert_allclose(found.view(2, 2), by_hand(examples)[[3, 1]], rtol=1e-5)
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and not found.requires_grad


def test_a_copied_reference_is_the_first_model_and_has_no_dropout():
    model, examples = tiny(), some_pairs()
    reference = CopiedReference(plan_of(), model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    found = reference.log_probs(model, batcher_of(examples)([np.array([4])]))
    np.testing.assert_allclose(found.view(1, 2), by_hand(examples)[[4]], rtol=1e-5)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preference", "method", "kind"),
    [
        ({}, "full", PrecomputedReference),
        ({}, "lora", AdapterReference),
        ({"reference": "copy"}, "full", CopiedReference),
        ({"reference": "precompute"}, "lora", PrecomputedReference),
        ({"loss_type": "simpo"}, "full", type(None)),
        ({"loss_type": "orpo"}, "lora", type(None)),
        ({"loss_type": "ipo"}, "full", PrecomputedReference),
    ],
)
def test_the_recipe_chooses_the_reference(preference, method, kind):
    plan = plan_of(**preference)
    plan.build.method = MethodOptions(type=method)
    assert type(choose_reference(plan, torch.nn.Linear(1, 1))) is kind


@pytest.mark.parametrize(("autocast", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_copied_reference_computes_as_the_policy_does(autocast, dtype):
    examples, plan = some_pairs(1), plan_of()
    plan.precision.autocast = autocast
    found = CopiedReference(plan, tiny()).log_probs(None, batcher_of(examples)([np.array([0])]))
    with torch.autocast("cpu", dtype):
        wanted = by_hand(examples, make("llama").eval())
    np.testing.assert_allclose(found.view(1, 2), wanted, rtol=1e-6)
    assert abs(wanted - by_hand(examples)).max() > 1e-4


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_rows_hold_each_chosen_example_once(packed):
    """Packed rows have up to ten tokens, padded ones one example, longest first. There are two rows in a forward."""
    lengths, indices = np.array([4, 9, 3, 6, 7, 2]), np.array([5, 0, 3, 4])
    plan = SimpleNamespace(rows=SimpleNamespace(packed=packed, length=10))
    batches = [[row.tolist() for row in batch] for batch in rank_batches(plan, lengths, indices, size=2)]
    rows = [row for batch in batches for row in batch]
    assert sorted(index for row in rows for index in row) == [0, 3, 4, 5]
    if packed:
        assert [sum(lengths[row]) <= 10 for row in rows] == [True, True] and len(batches) == 1
    else:
        assert batches == [[[4], [3]], [[0], [5]]]


def test_a_copy_of_a_sharded_model_is_refused():
    plan = plan_of(reference="copy")
    plan.shares_weights, plan.strategy = True, "fsdp"
    with pytest.raises(UserError, match=r"^preference\.reference: copy needs a whole model on each process"):
        choose_reference(plan, torch.nn.Linear(1, 1))


def fixed_kl(examples: Examples, above: float) -> tuple[KtoTask, Batcher]:
    """Return a KTO task and a batcher whose reference log-probabilities lie at -100 - `above`."""

    class Fixed:
        def prepare(self, *arguments: object, **keywords: object) -> None:
            pass

        def fields(self, examples: Examples, indices: list[int]) -> dict[str, torch.Tensor]:
            return {"reference": torch.full((len(indices),), -100.0 - above)}

        def log_probs(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            return batch.pop("reference")

    task = KtoTask(None, plan_of(loss_type="kto"), Fixed(), CPU)
    return task, batcher_of(examples, task.batch_fields)


def single_answers() -> Examples:
    """Return five answers with a label."""
    found = []
    for number, example in enumerate(some_pairs()):
        ids, labels = example.documents()[0][:2]
        found.append(Example(ids, labels, "a:1", desirable=number % 2))
    return Examples(found)


def test_ranks_share_the_work_and_find_what_one_process_finds():
    """Of five pairs in batches of two, rank 1 has none in the second round. kl: of two answers, and of five."""
    examples, answers = some_pairs(), single_answers()
    model = tiny()

    def find(rank: int) -> tuple[np.ndarray, list[float], int]:
        if rank >= 0:
            torch.distributed.init_process_group("gloo")
        forwards: list[int] = []
        handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
        found = precompute(plan_of(), model, ReferenceRows(batcher_of(examples), None), silent)
        rounds = len(forwards)
        task, batcher = fixed_kl(answers, 50.0)
        task.prepare(model, [batcher])
        with torch.no_grad():
            kls = [float(task.inputs(answers, np.arange(count))["kl"]) for count in (2, 5)]
        handle.remove()
        return found, kls, rounds

    (alone, kls, rounds), ranks = find(-1), on_ranks(2, find)
    np.testing.assert_allclose(alone, by_hand(examples), rtol=1e-5)
    assert rounds == 3 and kls[0] != kls[1] and min(kls) > 10
    for found, other_kls, rounds in ranks:
        np.testing.assert_allclose(found, alone, rtol=1e-6)
        assert other_kls == pytest.approx(kls, rel=1e-5) and rounds == 2


# The quickstart's model and pairs: what their stored log-probabilities depend on.


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("key")
    return plan_run(folder, **settings(folder, pairs(8)))


def built(plan: Plan, **changes: object) -> Plan:
    return replace(plan, build=replace(plan.build, **changes))


def model_of(plan: Plan, **changes: object) -> Plan:
    return built(plan, model=plan.build.model.model_copy(update=changes))


def test_the_key_holds_everything_that_the_log_probabilities_depend_on(job):
    plan, examples = job.plan, job.data.train
    random, method = model_of(plan, init="random"), plan.build.method
    plans = {
        "weights": replace(plan, precision=Precision("bfloat16", "no")),
        "autocast": replace(plan, precision=Precision("float32", "bf16")),
        "autocast in fp16": replace(plan, precision=Precision("float32", "fp16")),
        "4 bits": built(plan, method=method.model_copy(update={"type": "qlora"})),
        "8 bits": built(plan, method=method.model_copy(update={"type": "qlora", "load_in_8bit": True})),
        "ld_alpha": replace(plan, build=plan.build.with_section(PreferenceSpec, ld_alpha=0.5)),
        "ld_alpha 0": replace(plan, build=plan.build.with_section(PreferenceSpec, ld_alpha=0.0)),
        "depth": model_of(plan, num_hidden_layers=2),
        "hub": model_of(plan, model_name_or_path="org/model"),
        "hub, other model": model_of(plan, model_name_or_path="org/other"),
        "hub, depth": model_of(plan, model_name_or_path="org/model", num_hidden_layers=2),
        "random": random,
        "random, other seed": built(random, seed=plan.build.seed + 1),
    }
    keys = {name: log_probs_key(other, examples) for name, other in plans.items()}
    keys |= {"same": log_probs_key(plan, examples), "other examples": log_probs_key(plan, job.data.eval)}
    order = examples.select([1, 0, *range(2, len(examples))])
    keys["other order"] = log_probs_key(plan, order)
    assert len(set(keys.values())) == len(keys)
    assert log_probs_key(plan, examples.select(range(len(examples)))) == keys["same"]


def test_a_seed_changes_the_key_of_random_weights_only(job):
    seeded = built(job.plan, seed=job.plan.build.seed + 1)
    assert log_probs_key(seeded, job.data.train) == log_probs_key(job.plan, job.data.train)


@pytest.mark.parametrize("where", [0.0, 0.3, 1.0])
def test_the_key_reads_the_weights_of_files_with_the_same_names_and_sizes(where, job, tmp_path):
    content = bytearray(9_000_000)

    def key(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(content)
        return log_probs_key(model_of(job.plan, model_name_or_path=str(folder)), job.data.train)

    first, again = key("one"), key("two")
    place = int(where * (len(content) - 1))
    content[max(place - 50_000, 0) : place + 1] = b"\1" * (place + 1 - max(place - 50_000, 0))
    assert again == first != key("other")


def test_the_key_reads_the_configuration(job, tmp_path):
    def key(text: str) -> str:
        (tmp_path / "config.json").write_text(text)
        return log_probs_key(model_of(job.plan, model_name_or_path=str(tmp_path)), job.data.train)

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert key('{"rope_theta": 1}') != key('{"rope_theta": 2}')


def test_stored_log_probabilities_are_read_from_the_run_first_and_never_if_they_are_damaged(job, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    plan = replace(job.plan, checkpoint=job.plan.checkpoint.model_copy(update={"output_dir": str(tmp_path / "run")}))
    stored, shape = StoredLogProbs(plan, job.data.train), (len(job.data.train), 2)
    places = [tmp_path / "run" / FOLDER / stored.name, cache_home() / stored.name]
    assert stored.load() is None
    values = np.arange(shape[0] * 2, dtype=np.float32).reshape(shape)
    stored.save(values)
    for place in places:
        np.testing.assert_array_equal(np.load(place), values)
    np.save(places[1], values + 1)
    np.testing.assert_array_equal(stored.load(), values)
    places[0].unlink()
    np.testing.assert_array_equal(stored.load(), values + 1)
    for damage in (np.nan, np.inf, -np.inf):
        damaged = values.copy()
        damaged[-1, 1] = damage
        np.save(places[1], damaged)
        assert stored.load() is None
    for damaged in (values[:-1], values[:, :1], values.astype(np.float64), values.T):
        np.save(places[1], damaged)
        assert stored.load() is None
    stored.save(values)
    np.testing.assert_array_equal(np.load(places[1]), values)


def test_the_fields_of_a_batch_are_those_of_its_examples(job, tmp_path, monkeypatch):
    """Training and evaluation examples have their own."""
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    plan = replace(job.plan, checkpoint=job.plan.checkpoint.model_copy(update={"output_dir": str(tmp_path / "run")}))
    wanted = {}
    for number, examples in enumerate((job.data.train, job.data.eval)):
        values = 1000 * number + np.arange(len(examples) * 2, dtype=np.float32).reshape(-1, 2)
        StoredLogProbs(plan, examples).save(values)
        wanted[number] = values
    reference = PrecomputedReference(plan)
    task = PreferenceTask(None, plan.build.section(PreferenceSpec), reference, CPU)
    batchers = [batcher_of(examples, task.batch_fields) for examples in (job.data.train, job.data.eval)]
    task.prepare(torch.nn.Linear(1, 1), batchers)
    for number, rows in ((0, [2, 0]), (1, [0])):
        batch = batchers[number]([np.array([row]) for row in rows])
        assert reference.log_probs(None, batch).tolist() == wanted[number][rows].flatten().tolist()
        assert "reference_log_probs" not in batch


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapter"])
def test_a_resumed_run_computes_its_reference_only_if_it_has_an_adapter(adapted, job, tmp_path, monkeypatch):
    """The model of a full run is no longer the initial one."""
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    plan = replace(job.plan, checkpoint=job.plan.checkpoint.model_copy(update={"output_dir": str(tmp_path / "run")}))
    plan = replace(plan, rows=replace(plan.rows, kind="grouped", length=64))
    examples, model = some_pairs(), tiny(adapted=adapted)
    reference = PrecomputedReference(plan)
    batcher = batcher_of(
        examples, PreferenceTask(None, plan.build.section(PreferenceSpec), reference, CPU).batch_fields
    )
    if not adapted:
        with pytest.raises(UserError, match="has lost its reference log-probabilities"):
            reference.prepare(model, [ReferenceRows(batcher, None)], resumed=True, say=silent)
        assert not (tmp_path / "cache").exists() and not (tmp_path / "run").exists()
        return
    reference.prepare(model, [ReferenceRows(batcher, None)], resumed=True, say=silent)
    found = reference.fields(examples, [1, 4])["reference_log_probs"]
    np.testing.assert_allclose(found, by_hand(examples)[[1, 4]].flatten(), rtol=1e-5)
    np.testing.assert_allclose(StoredLogProbs(plan, examples).load(), by_hand(examples), rtol=1e-5)


def test_numbers_of_ranks_are_those_of_the_main_rank(job, tmp_path, monkeypatch):
    """Each rank has its own cache, as on two hosts; only the main rank's one is read."""
    plan = replace(job.plan, checkpoint=job.plan.checkpoint.model_copy(update={"output_dir": str(tmp_path / "run")}))
    shape = len(job.data.train), 2

    def load(rank: int) -> list[float] | None:
        torch.distributed.init_process_group("gloo")
        monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / str(rank)))
        stored = StoredLogProbs(plan, job.data.train)
        cache_home().mkdir(parents=True, exist_ok=True)
        np.save(cache_home() / stored.name, np.full(shape, rank + 1, np.float32))
        found = stored.load()
        return None if found is None else found.ravel().tolist()

    Path(tmp_path / "run").mkdir()
    assert on_ranks(2, load) == [[1.0] * (2 * shape[0])] * 2
