"""docs/examples/launch: what the files start on stand-ins of the launchers, schemas, and two real torchrun nodes."""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.command_line import RECIPE, ROOT, environment, losses, overrides, run_here
from torch.distributed.run import get_args_parser

LAUNCH = ROOT / "docs" / "examples" / "launch"
TWO_NODES = LAUNCH / "torchrun_two_nodes.sh"
# keys of a task, from SkyPilot's page "YAML specification"
SKYPILOT_KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "config",
                 "setup", "run"}  # fmt: skip

Bash = Callable[..., tuple[int, list[list[str]], str]]


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    """Run bash; return its exit code, the command lines of the launchers that it started, and stderr."""
    calls = tmp_path / "calls.jsonl"

    def stand_in(name: str, code: int) -> None:
        text = (
            f"#!{sys.executable}\nimport json, sys\nwith open({str(calls)!r}, 'a') as out:\n"
            f"    print(json.dumps([{name!r}, *sys.argv[1:]]), file=out)\nsys.exit({code})\n"
        )
        (tmp_path / "bin" / name).write_text(text, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*arguments: object, code: int = 0, **variables: str) -> tuple[int, list[list[str]], str]:
        for name in ("torchrun", "srun", "ligertune"):
            stand_in(name, code)
        path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
        env = {"PATH": path, "HOME": str(tmp_path), "USER": "user", **variables}
        done = subprocess.run(["bash", *map(str, arguments)], env=env, capture_output=True, text=True, check=False)
        found = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return done.returncode, [json.loads(line) for line in found], done.stderr

    (tmp_path / "bin").mkdir()
    (tmp_path / "ligertune-env" / "bin").mkdir(parents=True)
    (tmp_path / "ligertune-env" / "bin" / "activate").touch()
    stand_in("scontrol", 0)
    return run


def torchrun(call: list[str]) -> argparse.Namespace:
    """Read a command line as torchrun does."""
    program, *arguments = call
    assert program == "torchrun"
    read = get_args_parser().parse_args(arguments)
    assert read.module and read.training_script == "ligertune"
    return read


def test_the_two_nodes_differ_in_their_rank_only(bash):
    set_ = ["--set", "train.max_steps=2"]
    for rank in ("0", "1"):
        code, (call,), _ = bash(TWO_NODES, "r.yaml", *set_, NODE_RANK=rank, MASTER_ADDR="10.0.0.1")
        read = torchrun(call)
        assert (code, read.nnodes, read.nproc_per_node, read.node_rank) == (0, "2", "gpu", int(rank))
        assert (read.master_addr, read.master_port) == ("10.0.0.1", 29500)
        assert read.training_script_args == ["train", "r.yaml", "--resume", "auto", *set_]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ([], {}, "usage: NODE_RANK=0|1"),
        (["r.yaml"], {}, "set NODE_RANK to 0"),
        (["r.yaml"], {"NODE_RANK": "0"}, "set MASTER_ADDR"),
    ],
)
def test_a_missing_setting_of_two_nodes_is_named(bash, arguments, variables, said):
    code, calls, err = bash(TWO_NODES, *arguments, **variables)
    assert code and not calls and said in err


def test_a_slurm_job_goes_back_to_the_queue_if_it_was_interrupted(bash):
    job = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "17"}
    code, calls, _ = bash(LAUNCH / "slurm.sh", "r.yaml", code=130, **job)
    assert code == 130 and calls[1] == ["scontrol", "requeue", "17"]
    assert calls[0][0] == "srun" and calls[0][-5:] == ["ligertune", "train", "r.yaml", "--resume", "auto"]
    code, calls, _ = bash(LAUNCH / "slurm.sh", "r.yaml", code=1, **job)
    assert code == 1 and [call[0] for call in calls] == ["srun"]


def test_skypilot_starts_torchrun_on_several_nodes_only(bash):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
    assert set(task) <= SKYPILOT_KEYS and task["resources"].keys() == {"infra", "accelerators"}
    assert bash("-n", "-c", task["setup"])[0] == 0
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    resumed = ["train", "recipe.yaml", "--resume", "auto"]
    _, (call,), _ = bash("-c", task["run"], **task["envs"], **node, SKYPILOT_NUM_NODES="1")
    assert call == ["ligertune", *resumed]
    _, (call,), _ = bash("-c", task["run"], **task["envs"], **node, SKYPILOT_NUM_NODES="2")
    read = torchrun(call)
    assert (read.nnodes, read.nproc_per_node, read.node_rank, read.master_addr) == ("2", "8", 1, "10.0.0.1")
    assert read.training_script_args == resumed


def test_the_kubernetes_objects_refer_to_each_other():
    claim, runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes_trainjob.yaml").read_text(encoding="utf-8"))
    assert [each["kind"] for each in (claim, runtime, job)] == ["PersistentVolumeClaim", "TrainingRuntime", "TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)
    assert volumes["workspace"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    read = torchrun([*trainer["command"], *trainer["args"]])
    assert read.training_script_args == ["train", "/recipe/recipe.yaml", "--resume", "auto"]


def test_the_kubernetes_objects_have_the_keys_of_their_schema():
    """The models of the package drop keys that they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, *objects = yaml.safe_load_all((LAUNCH / "kubernetes_trainjob.yaml").read_text(encoding="utf-8"))
    for written in objects:
        model = getattr(models, f"TrainerV1alpha1{written['kind']}")
        assert model.from_dict(written).to_dict() == written


@pytest.mark.slow
def test_two_nodes_of_one_process_have_the_losses_of_one_process(tmp_path):
    settings = {"train.max_steps": 3, "train.global_batch_size": 8, "train.per_device_train_batch_size": 4,
                "data.val_split": 0, "model.dtype": "float32", "logging.logging_steps": 1,
                "checkpoint.save_strategy": "no", "checkpoint.save_model": "false",
                "checkpoint.output_dir": "run"}  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**environment(), "PATH": path, "GPUS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    nodes = [
        subprocess.Popen(["bash", TWO_NODES, RECIPE, *overrides(settings)], env={**env, "NODE_RANK": rank},
                         cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in ("0", "1")
    ]  # fmt: skip
    said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)[-4000:]
    assert json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["world_size"] == 2
    alone = {**settings, "train.per_device_train_batch_size": 8, "checkpoint.output_dir": "alone"}
    done = run_here("train", RECIPE, *overrides(alone), cwd=tmp_path)
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
