"""srun tasks join a run as ranks; batch scripts and other processes do not."""

import pytest

from ligertune.errors import UserError
from ligertune.launcher.processes import first_node, slurm_variables, tasks_of_nodes

TASK = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2(x2)", "SLURM_STEP_NODELIST": "gpu[007-009,012]",
}  # fmt: skip


def test_a_task_becomes_a_rank():
    assert slurm_variables(TASK) == {
        "RANK": "9", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu007", "MASTER_PORT": "23456",
    }  # fmt: skip


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**TASK, "WORLD_SIZE": "12"},  # torchrun under srun
    ],
)
def test_other_processes_become_no_rank(environ):
    assert slurm_variables(environ) == {}


def test_a_task_that_sees_only_its_own_gpu_is_refused():
    assert slurm_variables({**TASK, "CUDA_VISIBLE_DEVICES": "0,1"})["LOCAL_RANK"] == "1"
    with pytest.raises(UserError, match="2 tasks share the node"):
        slurm_variables({**TASK, "CUDA_VISIBLE_DEVICES": "1"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu3", "gpu3"), ("gpu3,gpu4", "gpu3"), ("gpu[10-12],cpu1", "gpu10"), ("r[1,3]-ib", "r1-ib")]
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


def test_tasks_of_each_node():
    assert tasks_of_nodes("8(x3),2,1(x2)") == [8, 8, 8, 2, 1, 1]
