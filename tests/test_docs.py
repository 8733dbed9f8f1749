"""What README.md and docs/ say is so: examples run and print what is shown, commands exist, links lead somewhere, and
the pages that list things list what there is.

A Python block is run in a folder of its own, under `mgpu run -n 2` if it calls `collectives.init()`. A block `text`
behind it is what it prints, ranks in any order. A block that stands in the source word for word is an excerpt.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from collectives.builder import algorithms
from collectives.contract import COLLECTIVES
from collectives.inspect import draw
from collectives.lowering import build
from mgpu_core import cli

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
PACKAGES = ("kernels", "collectives", "mgpu_core", "bench")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(mgpu|make|pip install|python -m) \S")


class Example(NamedTuple):
    """A block of Python, and what it prints, if the page says so."""

    page: str
    code: str
    output: str

    @property
    def name(self) -> str:
        first = re.match(r"# (\w+\.py)\n", self.code)
        return first[1] if first else "example.py"

    @property
    def imports(self) -> set[str]:
        nodes = list(ast.walk(ast.parse(self.code)))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        return {name.partition(".")[0] for name in names}


def examples() -> Iterator[Any]:
    for page, text in sorted(PAGES.items()):
        found = list(FENCED.finditer(text))
        for block, following in zip(found, [*found[1:], None]):
            if block[1] == "python" and not any(block[2] in source for source in sources().values()):
                shown = following and following[1] == "text" and not text[block.end() : following.start()].strip()
                example = Example(page, block[2], following[2] if following and shown else "")
                line = 1 + text[: block.start()].count("\n")
                yield pytest.param(example, id=f"{page}:{line} {example.name}")


def commands() -> Iterator[Any]:
    """What a shell is given: lines that are indented or in a block of their own, and code within the text."""
    for page, text in sorted(PAGES.items()):
        lines = [line for block in FENCED.finditer(text) if block[1] == "sh" for line in block[2].splitlines()]
        prose = FENCED.sub("", text)
        lines += re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
        lines += [code for line in prose.splitlines() if line[:4].strip() for code in re.findall(r"`([^`]+)`", line)]
        for line in dict.fromkeys(lines):
            if COMMAND.match(line) and not re.search(r"\b[A-Z]{2,}\b(?!=)|\.\.\.", line.partition("#")[0]):
                yield pytest.param(page, line, id=f"{page}: {line.partition('#')[0].strip()}")


@cache
def sources() -> dict[str, str]:
    return {str(path): path.read_text() for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_runs_and_prints_what_is_shown(example: Example, tmp_path: Path) -> None:
    missing = sorted(name for name in example.imports if find_spec(name) is None)
    if missing or ("cupy" in example.imports and not os.path.exists("/dev/nvidiactl")):
        pytest.skip(f"not installed, or no GPU: {', '.join(missing) or 'cupy'}")
    (tmp_path / example.name).write_text(example.code)
    ranks = ["-m", "mgpu_core", "run", "-n", "2", "--prefix"] if "collectives.init()" in example.code else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, *ranks, example.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    if example.output:
        printed = re.sub(r"^\[\d+\] ", "", ran.stdout, flags=re.MULTILINE)  # whole lines, thanks to --prefix
        assert sorted(printed.splitlines()) == sorted(example.output.splitlines())


class Parsed(BaseException):
    """The arguments are right. Nothing is done with them."""


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_a_command_exists_and_takes_these_arguments(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets
        return
    if program == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert all(extra in extras for extra in re.findall(r"\[(\w+)\]", line))
        return
    if program == "mgpu" and len(arguments) == 1:
        assert arguments[0] in {**cli.COMMANDS, **cli.GROUPS}
        return
    if "--import" in arguments:  # from an example of the same page; in a process of its own, which forgets it
        for example in (param.values[0] for param in examples()):
            if example.page == page:
                (tmp_path / example.name).write_text(example.code)
        command = [sys.executable, "-m", "mgpu_core", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=100)
        return
    if program == "mgpu" and arguments[0] in ("verify", "predict"):  # quick enough to be done
        assert cli.main(arguments) == 0
        return
    if arguments[:2] == ["-m", "pytest"]:  # which has a parser of its own, and would run them here
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests"))
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        parse(self, *given, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    try:
        if program == "mgpu":
            assert cli.dispatch(arguments) == 0  # help, which parses nothing
        else:
            main = importlib.import_module(arguments[1]).main
            if inspect.signature(main).parameters:
                main(arguments[2:])
            else:
                assert arguments[2:] == []
    except Parsed:
        pass
    except SystemExit as end:
        assert end.code in (0, None), capsys.readouterr().err


def test_files_that_are_named_exist() -> None:
    for page, text in PAGES.items():
        for path in re.findall(r"`((?:kernels|collectives|mgpu_core|bench|tests|docs)/[\w/.-]*)`", text):
            assert (ROOT / path).exists(), f"{page} names {path}, which is not there"
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if not target.startswith("http"):
                assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}, which is not there"


def test_the_index_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", PAGES["docs/index.md"]))
    assert linked == {Path(page).name for page in PAGES if page.startswith("docs/")} - {"index.md"}


def test_the_pages_list_every_algorithm() -> None:
    rows = re.findall(r"^\| (\w+) \| (.+?) \| ", PAGES["docs/algorithms.md"], re.MULTILINE)
    listed = {collective: set(re.findall(r"`(\w+)`", names)) for collective, names in rows if collective in COLLECTIVES}
    assert listed == {collective: set(algorithms(collective)) for collective in COLLECTIVES}


def test_pictures_of_programs_are_what_is_drawn() -> None:
    """`mgpu verify --draw` would print the same, for some number of ranks and kind of memory."""
    shown = re.findall(r"((?:^    .*\n)+)", PAGES["docs/algorithms.md"], re.MULTILINE)
    pictures = {textwrap.dedent(block).rstrip("\n") for block in shown if block.lstrip().startswith("step")}
    assert len(pictures) > 10
    for collective in sorted(COLLECTIVES.keys() - {"send_recv"}):
        for name in algorithms(collective):
            options: dict[str, Any] = {"groups": 2} if name == "hierarchical" else {}
            for size, memory in itertools.product((3, 4, 5), ("symmetric", "staged")):
                drawn = draw(build(collective, name, size, memory=memory, **options))
                pictures.discard(drawn.split("\n\n")[1])
    assert pictures == set()


def test_error_messages_are_quoted_as_they_are() -> None:
    """A heading of troubleshooting.md is a message of ours, with … for what varies."""
    told = {text for source in sources().values() for text in _texts(ast.parse(source))}
    quoted = re.findall(r"^\*\*`(.+?)`\*\*", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) > 50
    for message in quoted:
        assert any(_says(text, message.split("…")) for text in told), f"nothing in the source says {message!r}"


def test_variables_of_the_environment_are_read_somewhere() -> None:
    read = {name for source in sources().values() for name in re.findall(r"MGPU_[A-Z_]+", source)}
    for page, text in PAGES.items():
        assert set(re.findall(r"\bMGPU_[A-Z_]+\b", text)) <= read, page


def test_public_names_have_types(tmp_path: Path) -> None:
    """mypy, as an editor would, knows every public name, and finds nothing wrong with the typed example."""
    (typed,) = [param.values[0] for param in examples() if param.values[0].name == "typed.py"]
    (tmp_path / "typed_example.py").write_text(typed.code)
    modules = ("collectives", "mgpu_core", "mgpu_core.parallel")
    names = [f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__]
    reveal = [f"import {module}" for module in modules] + [f"reveal_type({name})" for name in names]
    (tmp_path / "names.py").write_text("\n".join(reveal))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", tmp_path / "typed_example.py", tmp_path / "names.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    revealed = re.findall(r'Revealed type is "(.+)"', ran.stdout)
    assert len(revealed) == len(names)
    assert [name for name, type_ in zip(names, revealed) if type_ == "Any"] == []


def _says(text: str, parts: list[str]) -> bool:
    """Whether all parts are in a text, one behind the other."""
    end = 0
    for part in parts:
        start = text.find(part, end)
        if start < 0:
            return False
        end = start + len(part)
    return True


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every string in a module; of an f-string what does not vary, with … between."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value
