"""Where a process stands, from the variables that each launcher sets."""

import os
import socket
import subprocess
import sys

import pytest

import collectives
from collectives.environment import first_host, place, standing
from collectives.place import endpoint

SECRET = "0123456789abcdef"

MGPU = {"MGPU_RANK": "1", "MGPU_SIZE": "4", "MGPU_ADDRESS": "unix:here", "MGPU_SECRET": SECRET}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-vm-23577@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_NTASKS": "99", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0",
}  # fmt: skip


def changed(base, **changes):
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    "environ,expected",
    [
        ({}, ("none", 0, 1, 0, 1)),
        (MGPU, ("mgpu run", 1, 4, 1, 4)),
        (changed(MGPU, MGPU_LOCAL_RANK="0", MGPU_LOCAL_SIZE="2"), ("mgpu run", 1, 4, 0, 2)),
        (TORCHRUN, ("torchrun", 3, 4, 3, 4)),
        (changed(TORCHRUN, MASTER_PORT=None), ("none", 0, 1, 0, 1)),
        (OPEN_MPI, ("mpirun", 1, 2, 1, 2)),
        (MPICH, ("mpiexec", 1, 2, 1, 2)),
        (SRUN, ("srun", 5, 7, 1, 3)),
        (changed(SRUN, SLURM_STEP_NUM_TASKS=None), ("none", 0, 1, 0, 1)),  # a batch script itself is no rank
        ({**MGPU, **TORCHRUN, **OPEN_MPI}, ("mgpu run", 1, 4, 1, 4)),  # spawn inside of other launchers
        ({**OPEN_MPI, **SRUN}, ("mpirun", 1, 2, 1, 2)),  # mpirun inside of a batch job
        ({**MPICH, **SRUN}, ("mpiexec", 1, 2, 1, 2)),
        ({"PMI_RANK": "5", "PMI_SIZE": "7", **SRUN}, ("srun", 5, 7, 1, 3)),  # srun --mpi=pmi2
    ],
)
def test_each_launcher_is_recognised(environ, expected):
    found = standing(environ)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == expected


@pytest.mark.parametrize("environ", [MGPU, TORCHRUN, changed(TORCHRUN, LOCAL_WORLD_SIZE=None), OPEN_MPI, MPICH])
def test_ranks_of_one_host_meet_at_a_unix_socket_of_their_job(environ):
    ours = place(environ=environ)
    assert endpoint(ours)[0] == socket.AF_UNIX
    assert ours.size == standing(environ).size
    variables = ("MGPU_ADDRESS", "MASTER_PORT", "PMIX_NAMESPACE", "I_MPI_HYDRA_UUID")
    others = [
        {**environ, name: "unix:1234" if name == "MGPU_ADDRESS" else "1234"} for name in variables if name in environ
    ]
    assert all(endpoint(place(environ=other)) != endpoint(ours) for other in others)


def test_a_restart_by_torchrun_meets_apart_from_the_attempt_before():
    assert place(environ=TORCHRUN).address != place(environ={**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).address


@pytest.mark.parametrize(
    "environ,address",
    [
        (changed(TORCHRUN, LOCAL_WORLD_SIZE="2", MASTER_ADDR="node7"), "node7:29501"),
        (changed(TORCHRUN, LOCAL_WORLD_SIZE="2", MASTER_ADDR="fd00::1"), "[fd00::1]:29501"),
        (changed(TORCHRUN, LOCAL_WORLD_SIZE=None, MASTER_ADDR="pod-0"), "pod-0:29501"),  # nobody says that it is one
        (changed(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="1", MGPU_ADDRESS="node1:7000"), "node1:7000"),
        (changed(MPICH, MPI_LOCALNRANKS="1", MGPU_ADDRESS="node1:7000"), "node1:7000"),
        (changed(SRUN, MGPU_ADDRESS="node1:7000"), "node1:7000"),
    ],
)
def test_ranks_of_several_hosts_meet_over_tcp(environ, address):
    assert place(environ=environ).address == address


def test_srun_s_ranks_of_several_hosts_meet_at_the_first_host_and_a_port_of_their_step():
    host, port = place(environ=SRUN).address.split(":")
    assert host == "gpu07" and 10_000 <= int(port) < 30_000
    assert place(environ={**SRUN, "SLURM_STEP_ID": "1"}).address != f"{host}:{port}"


@pytest.mark.parametrize(
    "environ,remedy",
    [
        (changed(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="1"), "mpirun -x MGPU_ADDRESS"),
        (changed(MPICH, MPI_LOCALNRANKS="1"), "mpiexec -genv MGPU_ADDRESS"),
        (changed(MGPU, MGPU_ADDRESS=None), "set MGPU_ADDRESS"),
    ],
)
def test_a_missing_address_says_what_to_do(environ, remedy):
    with pytest.raises(ValueError, match=remedy):
        place(environ=environ)


@pytest.mark.parametrize(
    "nodes,first",
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[07-09,11],login1", "node07"),
        ("node[3]", "node3"),
        ("rack[1-2]node[05,07]-ib,x", "rack1node05-ib"),
        ("a,b[1-2]", "a"),
        ("", ""),
    ],
)
def test_slurm_s_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("text,counts", [("4(x2),3", [4, 4, 3]), ("5", [5]), ("1,2(x3)", [1, 2, 2, 2])])
def test_slurm_s_tasks_per_node(text, counts):
    for node, count in enumerate(counts):
        environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}
        assert standing(environ).local_size == count
    with pytest.raises(ValueError, match="SLURM_NODEID"):
        standing({**SRUN, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(len(counts))})


@pytest.mark.parametrize(
    "environ,name",
    [
        (changed(MGPU, MGPU_RANK="x"), "MGPU_RANK='x'"),
        (changed(MGPU, MGPU_RANK=None), "MGPU_RANK=''"),
        (changed(MGPU, MGPU_RANK="-1"), "MGPU_RANK='-1'"),
        (changed(MGPU, MGPU_RANK=""), "MGPU_RANK=''"),
        (changed(MGPU, MGPU_SIZE=None), "MGPU_SIZE=''"),
        (changed(MGPU, MGPU_SIZE="0"), "MGPU_SIZE='0'"),
        (changed(MGPU, MGPU_SIZE="1e3"), "MGPU_SIZE='1e3'"),
        (changed(MGPU, MGPU_SIZE="٤"), "MGPU_SIZE='٤'"),
        (changed(MGPU, MGPU_RANK="4"), "rank 4 of 4"),
        (changed(MGPU, MGPU_SECRET="short"), "MGPU_SECRET has 5 characters"),
        (changed(TORCHRUN, MASTER_PORT="http"), "MASTER_PORT='http'"),
        (changed(SRUN, SLURM_STEP_NUM_TASKS="many"), "SLURM_STEP_NUM_TASKS='many'"),
    ],
)
def test_nonsense_is_refused_by_name(environ, name):
    with pytest.raises(ValueError, match=name):
        place(environ=environ)


def test_what_is_given_counts_more_than_the_launcher():
    ours = place(2, 3, "10.0.0.1:5000", timeout=7.0, environ={**TORCHRUN, "MGPU_SECRET": SECRET, "MGPU_HOST": "me"})
    assert (ours.rank, ours.size, ours.address, ours.timeout) == (2, 3, "10.0.0.1:5000", 7.0)
    assert (ours.secret, ours.host) == (SECRET.encode(), "me")
    assert place(address="unix:mine", environ=TORCHRUN).address == "unix:mine"
    assert place(0, 2, environ={"MGPU_ADDRESS": "unix:x"}).address == "unix:x"
    with pytest.raises(ValueError, match="give both"):
        place(rank=1, environ={})
    with pytest.raises(ValueError, match="rank 3 of 3"):
        place(3, 3, "unix:x", environ={})
    with pytest.raises(ValueError, match="pass address="):
        place(0, 2, environ=TORCHRUN)


@pytest.mark.parametrize("shells", [0, 1, 2])
def test_the_launching_process_is_found_through_shells_between(shells):
    own = open("/proc/self/comm").read().strip()
    code = f"from collectives.environment import _ancestor; print(_ancestor({own!r}), _ancestor('no such launcher'))"
    command = [sys.executable, "-c", code]
    for _ in range(shells):
        command = ["sh", "-c", '"$@"; true', "sh", *command]  # the last command keeps the shell from being replaced
    nearest, parent = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60).stdout.split()
    assert nearest == str(os.getpid())
    assert (parent == nearest) == (shells == 0)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("MGPU_HEAP", "1K", "MGPU_HEAP is too small"),
        ("MGPU_STALL", "soon", "MGPU_STALL='soon' is not a number of seconds"),
    ],
)
def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises((MemoryError, ValueError), match=error):
        collectives.init(rank=0, size=1)
