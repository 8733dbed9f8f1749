"""The rules of the house: which package may import which, what every module and test has, and how it is shipped."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "collectives", "mgpu_core", "bench")  # each may import itself and those before it
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Imported inside functions, and only where they are needed: they are slow, or not installed. Modules named for one of
# them are where they live.
HEAVY = ("numba.cuda", "cupy", "torch", "mpi4py", "nccl", "cuda", "sklearn", "matplotlib")
DEVICE_MODULES = {"driver", "cuda", "sim", "nccl", "mpi", "gloo"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that the code imports anywhere in it; `from a import b` counts as a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def runs_on_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not the bodies of functions, not `if TYPE_CHECKING`."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            pending += statement.orelse
            continue
        inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt | ast.excepthandler)]
        for child in inner:
            pending += child.body if isinstance(child, ast.excepthandler) else [child]
        if not inner:
            yield statement


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_has_a_docstring_and_imports_only_downwards(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "says nothing about itself"
    package = path.relative_to(ROOT).parts[0]
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    upwards = [name for name in imported(tree) if name.partition(".")[0] in (*above, "tests")]
    assert not upwards, f"{package} must not import {upwards}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_importing_a_module_for_the_cpu_imports_nothing_heavy(path: Path) -> None:
    if path.stem in DEVICE_MODULES:
        return
    names = [name for statement in runs_on_import(ast.parse(path.read_text())) for name in imported(statement)]
    heavy = [name for name in names if any(name == top or name.startswith(f"{top}.") for top in HEAVY)]
    assert not heavy


def test_importing_the_library_loads_no_cuda() -> None:
    """What the text of the modules cannot show: that none of them loads a module for a device."""
    code = "import sys, collectives, mgpu_core; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not {"numba.cuda", "cupy", "torch", "mpi4py", "matplotlib", "cuda.bindings"} & set(loaded.split())


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=name_of)
def test_every_test_asserts_something(path: Path) -> None:
    """Itself, or by a function of its file that it uses (a rank's part), or by a fixture that all tests there have."""
    functions = {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}

    def asserts(function: ast.FunctionDef, seen: frozenset[str]) -> bool:
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                return True
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("raises", "fail", "warns") or name.startswith(("assert_", "check", "verify")):
                return True
            if name in functions and name not in seen and asserts(functions[name], seen | {name}):
                return True
        return False

    fixtures = [node for node in functions.values() if any("autouse" in ast.unparse(d) for d in node.decorator_list)]
    tests = [name for name in functions if name.startswith("test_")]
    assert tests
    if not any(asserts(fixture, frozenset()) for fixture in fixtures):
        assert not [name for name in tests if not asserts(functions[name], frozenset({name}))]


def test_no_tracked_file_is_large() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    assert paths
    assert not [path for path in paths if path.is_file() and path.stat().st_size > 1_000_000]


def test_the_changelog_knows_this_version() -> None:
    assert f"## {kernels.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_installation_has_the_command() -> None:
    scripts = {entry.value for entry in entry_points(group="console_scripts", name="mgpu")}
    assert scripts == {"mgpu_core.cli:main"}


@pytest.mark.slow
def test_the_wheel_holds_every_module_of_the_four_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since a build leaves its files beside the sources
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    built = subprocess.run(pip, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("mgpu_core-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    data = {"kernels/pack.cu", *(f"{package}/py.typed" for package in PACKAGES)}
    assert held == {name_of(path) for path in MODULES} | data


OLD = "#!/bin/sh\nexit 1\n"
NO_VENV = '#!/bin/sh\n[ "$1" != -m ]\n'


def make(folder: Path, command: str, python: str, **variables: str) -> list[str]:
    """Say `make command` in a folder with nothing installed, where it must fail; the lines on standard error."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PIP"))}
    arguments = ["make", command, f"PYTHON={python}"]
    ended = subprocess.run(arguments, capture_output=True, text=True, cwd=folder, env=environment | variables)
    assert ended.returncode != 0
    return ended.stderr.splitlines()


@pytest.mark.parametrize("command", ["train", "test"])
@pytest.mark.parametrize(
    ("script", "advice"),
    [(OLD, "needs Python 3.10 to 3.13"), (NO_VENV, "python3-venv")],
    ids=["Python too old", "no venv module"],
)
def test_make_says_in_one_line_what_python_lacks(tmp_path: Path, command: str, script: str, advice: str) -> None:
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    said, trailer = make(tmp_path, command, "./python")
    assert advice in said and f"make {command} PYTHON=" in said
    assert trailer.startswith("make: ***")


@pytest.mark.slow
def test_make_says_in_one_line_that_the_network_is_missing(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    notice, said, trailer = make(tmp_path, "train", sys.executable, **offline)
    assert notice.startswith("Installing")
    assert "is the network there?" in said and "make train" in said and "ERROR: Could not find a version" in said
    assert trailer.startswith("make: ***")
