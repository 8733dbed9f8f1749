"""Pictures of programs, and the commands `mgpu verify` and `mgpu predict`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from collectives import builder
from collectives.builder import Chunks, algorithm
from collectives.contract import COLLECTIVES
from collectives.errors import ProgramError
from collectives.inspect import draw, predict_main, verify_main
from collectives.lowering import build


def picture(collective: str, name: str, size: int, **options: object) -> list[str]:
    lines = draw(build(collective, name, size, **options)).split("\n")  # type: ignore[arg-type]
    return lines[2 : lines.index("", 2)]


def test_a_ring_in_pictures() -> None:
    assert picture("all_reduce", "ring", 3) == [
        "step  rank 0     rank 1     rank 2",
        "   1  2 + 2      0 + 0      1 + 1",
        "   2  1 + 2 !    2 + 0 !    0 + 1 !",
        "   3  0 from 2   1 from 0   2 from 1",
        "   4  2 from 2   0 from 0   1 from 1",
    ]


def test_pushes_and_stays_and_staging_in_pictures() -> None:
    assert picture("all_reduce", "two_shot", 3)[1] == "   1  0 + all to all !   1 + all to all !   2 + all to all !"
    assert picture("all_gather", "ring", 2, memory="staged") == [
        "step  rank 0     rank 1",
        "   1  0 staged   1 staged",
        "   2  0 stays    1 stays",
        "   3  1 from 1   0 from 0",
    ]
    assert build("broadcast", "chain", 3).draw().split("\n")[3:5] == [
        "   1  .        0 from 0   .",
        "   2  .        .          0 from 1",
    ]


def test_nothing_to_see() -> None:
    assert picture("barrier", "direct", 2) == ["step  rank 0   rank 1"]


def test_verify_says_what_it_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_main(["all_reduce", "ring", "-n", "8"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.match(r"all_reduce by ring, 8 ranks, symmetric memory: right. 112 moves, 112 signals, 0 cells", out[0])
    assert "staged" in out[1] and len(out) == 2
    assert verify_main(["broadcast", "-n", "3", "--memory", "staged", "--draw", "--list"]) == 0
    out_text = capsys.readouterr().out
    assert out_text.count("right.") == len(builder.algorithms("broadcast"))
    assert "0 from 0" in out_text and "wait " in out_text
    assert (
        verify_main(["all_reduce", "hierarchical", "-n", "6", "-o", "groups=((0,1,2),(3,4,5))", "-o", "inner=tree"])
        == 0
    )


def test_a_wrong_algorithm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {collective: dict(algorithms) for collective, algorithms in builder._registered.items()}
    monkeypatch.setattr(builder, "_registered", known)

    @algorithm("all_reduce")
    def forgetful(chunks: Chunks, size: int) -> None:
        for rank in range(1, size):
            chunks.reduce([chunks(rank=q) for q in range(1, size)], rank=rank)

    with pytest.raises(ProgramError, match="rank 0, chunk 0: the output is never written"):
        verify_main(["all_reduce", "forgetful"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["all_reduce", "rang"], "no all_reduce algorithm is called 'rang'; there are bidirectional_ring"),
        (["all_reduce", "hierarchical", "-o", "grups=2"], "unexpected keyword argument 'grups'"),
        (["send_recv", "-n", "3"], "send_recv cannot be among 3 ranks"),
        (["all_reduced"], "invalid choice: 'all_reduced'"),
    ],
)
def test_wrong_usage(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (verify_main, predict_main):
        with pytest.raises(SystemExit) as caught:
            command(arguments)
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        assert complaint in err and not out


def test_a_size_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict_main(["all_reduce", "ring", "-b", "small"])
    assert "-b/--minbytes: 'small' is not a size; expected bytes, or a number with K" in capsys.readouterr().err


def test_predict_marks_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_main(["all_reduce", "-n", "8", "-b", "8", "-e", "32M", "-f", "64"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "all_reduce, 8 ranks on a plausible host (mgpu tune -n 8 measures this one): microseconds"
    names = head.split()[1:]
    fastest = [next(name for name, time in zip(names, row.split()[1:], strict=True) if "*" in time) for row in rows]
    assert fastest[0] == "one_shot" and fastest[-1] == "two_shot"


def test_predict_reads_a_topology_and_knows_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"hosts": [1, 1, 1, 1]}')
    assert predict_main(["all_reduce", "ring", "--topology", str(path), "-b", "1M", "-e", "1M"]) == 0
    assert predict_main(["all_reduce", "ring", "--topology", str(path), "-b", "1M", "-e", "1M", "--closed"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "all_reduce, 4 ranks on 4 hosts: microseconds" and out[2] == out[5]
    with pytest.raises(SystemExit):
        predict_main(["all_reduce", "-b", "0"])


@pytest.mark.parametrize(
    ("collective", "name", "size", "memory"),
    [
        ("all_reduce", "ring", 4, "symmetric"),
        ("all_reduce", "two_shot", 3, "staged"),
        ("broadcast", "chain", 4, "symmetric"),
        ("broadcast", "scatter_all_gather", 4, "symmetric"),
    ],
)
def test_the_documentation_shows_what_is_drawn(collective: str, name: str, size: int, memory: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert "\n".join("    " + line for line in picture(collective, name, size, memory=memory)) in text


def test_the_documentation_names_every_algorithm() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for collective in COLLECTIVES:
        for name in builder.algorithms(collective):
            assert f"`{name}`" in text, f"{collective} by {name}"


def test_algorithms_of_one_s_own_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file, with its neighbours, or from a module in the working folder; what is not there is named."""
    known = builder.algorithms("all_reduce")
    monkeypatch.setattr(builder, "_registered", {**builder._registered, "all_reduce": known})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    text = "import collectives\n\n@collectives.algorithm('all_reduce')\ndef {name}(chunks, size):\n"
    star = "    chunks.reduce([chunks(rank=r) for r in range(size)], rank=0).copy_to(range(size))\n"
    (tmp_path / "there" / "star_of_mine.py").write_text("import neighbour_of_mine\n" + text.format(name="star") + star)
    (tmp_path / "there" / "neighbour_of_mine.py").write_text("")
    (tmp_path / "wrong_of_mine.py").write_text(text.format(name="wrong") + "    chunks(rank=0)\n")
    assert verify_main(["all_reduce", "star", "-n", "3", "--import", "there/star_of_mine.py"]) == 0
    assert capsys.readouterr().out.count("all_reduce by star, 3 ranks") == 2
    assert predict_main(["all_reduce", "star", "-n", "3", "--import", "there/star_of_mine.py"]) == 0
    with pytest.raises(ProgramError):
        verify_main(["all_reduce", "wrong", "-n", "3", "--import", "wrong_of_mine"])
    with pytest.raises(FileNotFoundError) as missing:
        verify_main(["all_reduce", "--import", "nowhere.py"])
    assert missing.value.filename == "nowhere.py"
