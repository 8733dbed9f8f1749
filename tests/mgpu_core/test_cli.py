"""`mgpu` lists what is there, hands over the arguments, and says in a line what went wrong."""

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.contract import COLLECTIVES
from mgpu_core import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Makes a function the command `probe`."""

    def install(function: Callable[[list[str]], int]) -> None:
        module = types.ModuleType("probe_module")
        module.main = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_module", module)
        monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_module:main", "a probe"))

    return install


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_that_is_listed_exists(name: str) -> None:
    module, function = cli.COMMANDS[name][0].split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("group", cli.GROUPS)
def test_a_group_lists_the_modules_that_can_be_run(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = cli.members(cli.GROUPS[group][0])
    assert names and "__init__" not in names
    assert cli.main([group]) == 0
    listing = capsys.readouterr().out
    assert all(f"  {name.replace('_', '-')} " in listing or name in COLLECTIVES for name in names)


def test_every_collective_is_a_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from bench import collective

    seen = []
    monkeypatch.setattr(collective, "run", lambda name, argv: seen.append((name, argv)) or 7)
    assert cli.main(["bench"]) == 0
    listing = capsys.readouterr().out
    for name in COLLECTIVES:
        assert name in listing
        assert cli.main(["bench", name.replace("_", "-"), "-n", "2"]) == 7
        assert seen.pop() == (name, ["-n", "2"])


def test_members_are_the_public_modules_with_a_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "probe_package"
    folder.mkdir()
    runnable = '"""`mgpu probe fast`: What it does."""\n\ndef main(argv):\n    return len(argv)\n'
    for name, text in {"__init__": "", "fast_one": runnable, "support": "x = 1\n", "_hidden": runnable}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.GROUPS, "probe", ("probe_package", "probes"))
    assert cli.members("probe_package") == {"fast_one": "what it does"}
    assert cli.main(["probe", "fast_one", "a", "b"]) == cli.main(["probe", "fast-one", "a", "b"]) == 2
    assert cli.main(["probe", "support"]) == 2


def test_arguments_and_exit_code_pass_through(command: Callable[[Callable[[list[str]], int]], None]) -> None:
    seen: list[list[str]] = []
    command(lambda argv: seen.append(argv) or 7)  # type: ignore[func-returns-value]
    assert cli.main(["probe", "-n", "2", "--help"]) == 7
    assert seen == [["-n", "2", "--help"]]


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    listing = capsys.readouterr().out
    assert all(f"  {name} " in listing for name in (*cli.COMMANDS, *cli.GROUPS))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from kernels import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mgpu {__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("benhc", "bench"), ("RUN", "run"), ("trian", "train")])
def test_a_misspelt_command_is_answered_with_the_right_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([typed]) == 2
    assert capsys.readouterr().err == f"mgpu: no command '{typed}'; did you mean '{meant}'?\n"


def test_an_unknown_command_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["zzzzzz"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in (*cli.COMMANDS, *cli.GROUPS))


def test_ctrl_c_is_quiet(
    command: Callable[[Callable[[list[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    command(interrupted)
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["predict", "all_reduce", "ring"], ["--help"]], ids=["flushed", "at the end"])
def test_nobody_reads_on(arguments: list[str]) -> None:
    """As in `mgpu predict all_reduce ring | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mgpu_core", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_without_standard_output_nothing_is_printed_and_all_works(tmp_path: Path) -> None:
    """As after `>&-`: what ranks print is nobody's, and their failures are seen."""
    program = tmp_path / "program.py"
    program.write_text("import os; print('unseen'); raise SystemExit(3 * (os.environ['MGPU_RANK'] == '1'))")
    command = [sys.executable, "-m", "mgpu_core", "run", "-n", "2", str(program)]
    closed = subprocess.run(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, preexec_fn=lambda: os.closerange(0, 2)
    )
    assert (closed.returncode, closed.stderr) == (3, "mgpu run: rank 1 ended with exit code 3\n")


def test_an_error_of_ours_is_a_line_and_a_bug_is_a_traceback(
    command: Callable[[Callable[[list[str]], int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from collectives.installation import ShadowedPackageError

    def failing(argv: list[str]) -> int:
        raise KeyError("bug") if argv else ShadowedPackageError("it is hidden")

    command(failing)
    monkeypatch.delenv("MGPU_DEBUG", raising=False)
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().err == "mgpu: it is hidden\n"
    with pytest.raises(KeyError, match="bug"):
        cli.main(["probe", "with a bug"])
    command(lambda argv: open("not there").fileno())
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().err == "mgpu: not there: No such file or directory\n"
    command(failing)
    monkeypatch.setenv("MGPU_DEBUG", "1")
    with pytest.raises(ShadowedPackageError):
        cli.main(["probe"])
