"""One global batch, split over micro-batches and ranks: the losses agree to 1e-5."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from support.command_line import RECIPE, losses, overrides, run, weights
from support.quickstart_runs import RESUME, TWO_LAYERS, saves, train_ranks, unfinished

STEPS = 5
SETTINGS = {
    **TWO_LAYERS,
    "train.max_steps": STEPS,
    "train.global_batch_size": 8,
    "data.datasets.0.max_samples": 35,  # an epoch ends inside a step
    "data.val_split": 0,
    "data.packing": True,
    "model.dtype": "float32",
}
GROUPED = {"data.packing": False, "train.group_by_length": True}
DDP, FSDP = {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp"}
GATHERED = {**FSDP, "parallel.reshard_after_forward": False}
TWO_COPIES = {"parallel.dp_replicate_size": 2}
RECOMPUTED = {"kernels.recompute": True}  # its backward reads weights that FSDP gathers
OFFLOADED = {"train.gradient_checkpointing": "offload_both", "train.gradient_checkpointing_layers": 1, **RECOMPUTED}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """data.packing -> losses of one process that takes the global batch as one micro-batch."""
    settings = {**SETTINGS, "train.per_device_train_batch_size": 8}
    return {
        packing: train_ranks(1, tmp_path_factory.mktemp("whole"), **{**settings, **changes})
        for packing, changes in ((True, {}), (False, GROUPED))
    }


WAYS = {
    "packed-1x8": (1, {}),
    "hsdp-4x2": (4, {**FSDP, "parallel.dp_replicate_size": 2}),
    "packed-gathered-2x4": (2, GATHERED),
    "grouped-1x8": (1, GROUPED),
    "padding-free-ddp-2x4": (2, {**DDP, **GROUPED, "data.padding_free": True, "train.per_device_train_batch_size": 4}),
}
SLOW_WAYS = {
    "packed-ddp-2x4": (2, DDP),
    "grouped-ddp-2x4": (2, {**DDP, **GROUPED}),
    "recompute-fsdp-2x4": (2, {**FSDP, **RECOMPUTED}),
    "offload-gate-fsdp-2x4": (2, {**FSDP, "train.gradient_checkpointing": "offload_gate"}),
    "offload-both-fsdp-2x4": (2, {**FSDP, **OFFLOADED}),
}


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS)])
def test_losses_do_not_depend_on_how_the_batch_is_split(whole, way, tmp_path):
    ranks, changes = {**WAYS, **SLOW_WAYS}[way]
    found = train_ranks(ranks, tmp_path, **{**SETTINGS, "train.per_device_train_batch_size": 1, **changes})
    assert len(found) == STEPS
    assert found == pytest.approx(whole[changes.get("data.packing", True)], rel=1e-5)


CHOSEN = {"ddp": DDP, "fsdp": FSDP, "gathered": GATHERED,
          "hsdp": {**FSDP, **TWO_COPIES}, "gathered-hsdp": {**GATHERED, **TWO_COPIES}}  # fmt: skip
MANY = {**SETTINGS, "train.global_batch_size": 16, "data.datasets.0.max_samples": 80, "train.max_steps": 3}


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """data.packing -> losses of one process that takes 16 rows as one micro-batch."""
    settings = {**MANY, "train.per_device_train_batch_size": 16}
    return {
        packing: train_ranks(1, tmp_path_factory.mktemp("many"), **{**settings, **changes})
        for packing, changes in ((True, {}), (False, GROUPED))
    }


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("strategy", CHOSEN)
@pytest.mark.parametrize("ranks", [4, 8])
def test_each_strategy_that_a_plan_may_choose_trains_as_one_process(many, ranks, strategy, packing, tmp_path):
    """Each rank accumulates micro-batches of a row: four of 4 ranks, two of 8."""
    rows = {} if packing else GROUPED
    found = train_ranks(ranks, tmp_path, **{**MANY, **rows, "train.per_device_train_batch_size": 1, **CHOSEN[strategy]})
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["batching"]["accumulation"] == 16 // ranks
    assert found == pytest.approx(many[packing], rel=1e-5)


LAUNCH = [
    "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--main_process_port", "0", "--num_cpu_threads_per_process", "1",
    "-m", "ligertune", "train", str(RECIPE),
]  # fmt: skip
LAUNCHED = {**SETTINGS, "train.per_device_train_batch_size": 1, "train.warmup_ratio": 0, "logging.logging_steps": 1,
            "checkpoint.save_strategy": "no", "checkpoint.output_dir": "run"}  # fmt: skip


@pytest.mark.slow
def test_accelerate_launch_trains_with_fsdp2(whole, tmp_path):
    done = run([sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, *overrides(LAUNCHED)], cwd=tmp_path)
    assert done.code == 0, done.err[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(whole[True], rel=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks that start as commands would join this one process")
def test_ranks_with_the_environment_of_accelerate_launch_train_with_fsdp2(whole, tmp_path, monkeypatch):
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    for name, value in prepare_multi_gpu_env(launch_command_parser().parse_args(LAUNCH)).items():
        monkeypatch.setenv(name, value)
    found = train_ranks(2, tmp_path, **{**LAUNCHED, "checkpoint.output_dir": tmp_path / "run"})
    assert json.loads((tmp_path / "run" / "report.json").read_text())["strategy"] == "fsdp"
    assert found == pytest.approx(whole[True], rel=1e-5)


@pytest.mark.slow
def test_ranks_share_a_stream_as_one_process_reads_it(tmp_path):
    streamed = {**SETTINGS, "data.streaming": "true", "data.datasets.0.max_samples": "null"}
    alone = train_ranks(1, tmp_path / "alone", **{**streamed, "train.per_device_train_batch_size": 8})
    found = train_ranks(2, tmp_path / "ranks", **DDP, **{**streamed, "train.per_device_train_batch_size": 2})
    assert len(alone) == STEPS
    assert found == pytest.approx(alone, rel=1e-5)


needs_torchao = pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao: pip install torchao")
TORCHAO = [
    pytest.param({"train.optim": name, "model.dtype": "bfloat16"}, id=name, marks=[pytest.mark.slow, needs_torchao])
    for name in ("adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_fp8")
]


STAY_GATHERED = {"parallel.reshard_after_forward": False, "data.val_split": 0.1, "eval.eval_strategy": "steps",
                 "eval.eval_steps": 1}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="adamw"),
        pytest.param(STAY_GATHERED, id="gathered", marks=pytest.mark.slow),  # an evaluation before each save
        *TORCHAO,
    ],
)
def test_fsdp_resumes_to_the_same_bits_and_its_model_loads(changes, tmp_path):
    from transformers import AutoModelForCausalLM

    settings = {**SETTINGS, **FSDP, "train.per_device_train_batch_size": 4, **saves(2), **changes}  # fmt: skip
    expected = train_ranks(2, tmp_path, **settings)
    run = unfinished(tmp_path)  # its newest checkpoint is that of step 4
    assert all((run / "checkpoints" / "step-4" / f"random_states_{rank}.pkl").is_file() for rank in (0, 1))
    before = weights(run)
    assert train_ranks(2, tmp_path, **settings, **RESUME) == expected
    assert weights(run) == before
    _, info = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
