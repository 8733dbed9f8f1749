"""Another distribution's `kernels` or `bench` in our place is named, with its path, its owner and what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.installation import ShadowedPackageError, check_ours

ROOT = Path(__file__).parents[2]
EXPLODES = "raise RuntimeError('a stranger is imported')\n"


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter that looks into `folders` first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")


def stranger(folder: Path, package: str, owner: str | None = None) -> Path:
    """Put another `package` into `folder`, as the distribution `owner` would."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(EXPLODES)
    if owner:
        information = folder / f"{owner}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: 1.0\n")
        (information / "RECORD").write_text(f"{package}/__init__.py,,\n")
    return folder


@pytest.mark.parametrize("package", ["kernels", "bench"])
def test_our_own_packages_pass(package: str) -> None:
    check_ours(package)
    assert run(f"import collectives.installation as i; i.check_ours({package!r})").returncode == 0


@pytest.mark.parametrize("owner", ["kernels", "some-other-name"])
def test_a_distribution_that_hides_kernels_is_named(tmp_path: Path, owner: str) -> None:
    ended = run("import collectives", stranger(tmp_path, "kernels", owner))
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert "ShadowedPackageError" in said and "`kernels`" in said
    assert str(tmp_path / "kernels" / "__init__.py") in said
    assert f"the distribution '{owner}'" in said and f"pip uninstall {owner}" in said
    assert "a stranger is imported" not in ended.stderr


def test_a_folder_that_hides_kernels_is_named(tmp_path: Path) -> None:
    said = run("import collectives", stranger(tmp_path, "kernels")).stderr.splitlines()[-1]
    assert str(tmp_path) in said and "no installed distribution" in said and "sys.path" in said


def test_the_command_names_what_hides_bench(tmp_path: Path) -> None:
    code = "from mgpu_core.cli import main; raise SystemExit(main(['bench', 'all_reduce']))"
    ended = run(code, stranger(tmp_path, "bench", "benchtools"))
    assert ended.returncode == 1
    (said,) = ended.stderr.splitlines()
    assert said.startswith("mgpu: ") and "'benchtools'" in said and str(tmp_path) in said


def test_a_missing_package_is_not_called_hidden() -> None:
    with pytest.raises(ShadowedPackageError, match="is missing; reinstall"):
        check_ours("no_such_package_of_ours")


@pytest.mark.parametrize(
    ("system", "machine", "named"), [("darwin", "arm64", "darwin"), ("linux", "riscv64", "Linux on riscv64")]
)
def test_elsewhere_than_on_linux_x86_64_and_aarch64_the_import_says_so(system: str, machine: str, named: str) -> None:
    code = f"""
import os, sys, types
sys.platform, os.uname = {system!r}, lambda: types.SimpleNamespace(machine={machine!r})
import kernels
"""
    said = run(code).stderr.splitlines()[-1]
    assert said == f"ImportError: mgpu-core runs on Linux on x86-64 or aarch64, and this is {named}"
