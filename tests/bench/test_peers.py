"""Finding MPIs by what they say of themselves, and choosing among peers."""

import sys
from pathlib import Path

import pytest

from bench import peers
from bench.peers import PeerError, choose, find_mpis, identify

SAYS = {
    "openmpi": "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/",
    "impi": "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: ...",
}
VERSIONS = {"openmpi": "5.0.11", "impi": "2021.19.0", "mpich": "5.0.2"}


def installation(prefix: Path, says: str, library: str = "lib/libmpi.so.12") -> Path:
    """A folder that looks like an MPI."""
    mpiexec = prefix / "bin" / "mpiexec"
    mpiexec.parent.mkdir(parents=True)
    mpiexec.write_text(f"#!{sys.executable}\nprint({says!r})\n")
    mpiexec.chmod(0o755)
    (prefix / library).parent.mkdir(parents=True, exist_ok=True)
    (prefix / library).touch()
    return prefix


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only what the test puts into this folder is there."""
    monkeypatch.setenv("MGPU_PEERS", str(tmp_path / "peers"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(peers, "has", lambda module: True)
    return tmp_path


@pytest.mark.parametrize("name", SAYS)
def test_each_mpi_is_known_by_its_own_words(name: str, tmp_path: Path) -> None:
    found = identify(installation(tmp_path, SAYS[name]))
    assert found is not None
    assert (found.name, found.version) == (name, VERSIONS[name])
    assert found.library == tmp_path / "lib" / "libmpi.so.12"


def test_a_library_in_a_subfolder_is_found_as_debian_puts_it(tmp_path: Path) -> None:
    found = identify(installation(tmp_path, SAYS["openmpi"], "lib/x86_64-linux-gnu/libmpi.so.40"))
    assert found is not None and found.library.name == "libmpi.so.40"


def test_what_is_no_mpi_is_none(tmp_path: Path) -> None:
    assert identify(tmp_path) is None
    assert identify(installation(tmp_path / "other", "another mpiexec 1.0")) is None
    broken = installation(tmp_path / "broken", "")
    (broken / "bin" / "mpiexec").write_text("#!/no/such/interpreter\n")
    assert identify(broken) is None


def test_one_of_each_kind_is_found_ours_before_the_environments(nothing_else: Path) -> None:
    installation(nothing_else / "environment", SAYS["mpich"])
    installation(nothing_else / "peers" / "mpich", SAYS["mpich"])
    installation(nothing_else / "peers" / "a", SAYS["openmpi"])
    found = find_mpis()
    assert list(found) == ["openmpi", "mpich"]
    assert found["mpich"].mpiexec.parent.parent == nothing_else / "peers" / "mpich"


def test_an_mpi_on_the_path_is_found(nothing_else: Path) -> None:
    installation(nothing_else / "opt" / "mpi", SAYS["impi"])
    (nothing_else / "bin").mkdir()
    (nothing_else / "bin" / "mpiexec").symlink_to(nothing_else / "opt" / "mpi" / "bin" / "mpiexec")
    assert list(find_mpis()) == ["impi"]


def test_mpi_means_every_mpi_and_mpich_only_while_cores_suffice(nothing_else: Path) -> None:
    for name, says in SAYS.items():
        installation(nothing_else / "peers" / name, says)
    assert choose(["gloo", "mpi"], ranks=2, cores=2) == (["gloo", "openmpi", "mpich", "impi"], [])
    chosen, remarks = choose(["mpi"], ranks=4, cores=2)
    assert chosen == ["openmpi", "impi"]
    assert "MPICH is left out" in remarks[0]
    assert choose(["mpich"], ranks=4, cores=2) == (["mpich"], [])  # asked for by name
    assert choose(["impi", "mpi", "impi"], ranks=2, cores=2)[0] == ["impi", "openmpi", "mpich"]


def test_a_peer_that_is_not_here_is_left_out_with_what_to_do(
    nothing_else: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remark(name: str) -> str:
        chosen, (said,) = choose([name], 2, 2)
        assert chosen == [] and said.startswith(f"{name} is left out: ")
        return said

    assert "mgpu bench peers --install" in remark("mpi")
    assert "Open MPI was not found" in remark("openmpi")
    if not Path("/dev/nvidiactl").exists():
        assert "it is for GPUs" in remark("nccl")
    monkeypatch.setattr(peers, "has", lambda module: False)
    assert "pip install torch" in remark("gloo")
    assert "pip install mpi4py" in remark("mpi")
    assert "nccl4py" in remark("nccl")
    assert choose([], 2, 2) == ([], [])
    with pytest.raises(PeerError, match="unknown peer 'quics'"):
        choose(["quics"], 2, 2)


def test_ranks_are_not_bound_by_the_launcher(tmp_path: Path) -> None:
    for name, says in SAYS.items():
        mpi = identify(installation(tmp_path / name, says))
        assert mpi is not None
        command = mpi.command(3, ["python", "x.py"])
        assert command[-4:] == ["-n", "3", "python", "x.py"]
        assert mpi.environment()["MPI4PY_LIBMPI"] == str(mpi.library)
    assert "--oversubscribe" in peers.Mpi("openmpi", "5", tmp_path, tmp_path).command(2, [])
    assert peers.Mpi("impi", "2021", tmp_path, tmp_path).environment()["I_MPI_PIN"] == "0"
