"""What the doctor says of the environment and of libraries that do not fit together."""

from collectives import doctor
from collectives.doctor import software


def test_our_own_packages_are_found():
    assert not software.ours().advice


def test_python_too_old_or_too_new_is_serious():
    assert software.python((3, 9)).serious and software.python((3, 14)).serious
    assert not software.python((3, 12)).advice


def test_a_misspelt_setting_is_noticed_and_a_secret_is_not_shown():
    found = software.settings({"MGPU_HEEP": "1G", "MGPU_SECRET": "x" * 32, "MGPU_RANK": "0"})
    assert [finding.advice for finding in found] == ["did you mean MGPU_HEAP?", ""]
    assert "x" * 32 not in str(found)


def test_a_size_that_is_none_is_serious_and_everything_else_is_examined_all_the_same(monkeypatch):
    monkeypatch.setenv("MGPU_SCRATCH", "junk")
    monkeypatch.setenv("MGPU_HEAP", "")
    serious = [found for found in doctor.examine(trials=False) if found.serious and found.topic == "setting"]
    assert [found.what.partition(";")[0] for found in serious] == ["MGPU_SCRATCH='junk' is not a size"]
    assert software.settings({"MGPU_HEAP": "64G", "MGPU_SCRATCH": ""})[0].mark == "✓"


def test_every_setting_in_the_code_is_known():
    import re
    from pathlib import Path

    import collectives

    root = Path(collectives.__file__).parents[1]
    packages = [root / name for name in ("kernels", "collectives", "mgpu_core")]
    text = "".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    read = set(re.findall(r'environ(?:\.get\(|\[)"(MGPU_[A-Z_]+)"', text))
    assert read - software._BY_LAUNCHER <= set(software.SETTINGS)


def test_a_launcher_whose_ranks_could_not_meet_is_serious():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert not software.launcher(environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).advice
    apart = software.launcher(environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert apart.serious and "MGPU_ADDRESS" in apart.advice
    assert software.launcher({"MGPU_RANK": "none"}).serious


def test_an_mpirun_of_another_kind_than_the_library_is_serious(monkeypatch):
    answers = {"-c": "Open MPI v5.0.11, package: ...", "--version": "HYDRA build details: Version 4.3"}
    monkeypatch.setattr(software, "_version", lambda name: "4.1.2")
    monkeypatch.setattr(software.shutil, "which", lambda name: "/usr/bin/mpirun")
    monkeypatch.setattr(software, "_run", lambda command: (True, answers[command[1]]))
    found = software.mpi()
    assert found.serious and "rank 0 of 1" in found.advice
    answers["--version"] = "mpirun (Open MPI) 5.0.11"
    assert not software.mpi().advice


def test_mpi4py_without_a_library_is_serious(monkeypatch):
    monkeypatch.setattr(software, "_version", lambda name: "4.1.2")
    monkeypatch.setattr(software, "_run", lambda command: (False, "RuntimeError: cannot load MPI library"))
    found = software.mpi()
    assert found.serious and "cannot load MPI library" in found.what


def test_two_cupys_are_serious(monkeypatch):
    monkeypatch.setattr(software, "_version", lambda name: "13.6" if name.startswith("cupy") else None)
    assert software.frameworks()[0].serious


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MGPU_CACHE", str(tmp_path / "file"))
    assert "MGPU_CACHE" in software.kernel_cache().advice
