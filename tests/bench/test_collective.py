"""The benchmark as a user calls it."""

import json
from pathlib import Path

import pytest

from bench import all_reduce
from bench.candidates import Candidate
from bench.case import Case, placements
from bench.collective import parser, plan_cases, run, variants
from collectives.contract import COLLECTIVES


def labels(*arguments: str) -> list[str]:
    return [candidate.label for candidate in variants(parser("all_reduce").parse_args(arguments))]


def planned(arguments: str, collective: str = "all_reduce") -> list[Case]:
    return plan_cases(collective, parser(collective).parse_args(arguments.split()))


def test_n_is_ranks_and_the_other_flags_are_nccl_tests() -> None:
    arguments = parser("all_reduce").parse_args("-n 4 -b 8 -e 128M -f 2 -w 3 -c 0 -o max -d half --iters 50".split())
    assert (arguments.ranks, arguments.iters, arguments.warmup_iters, arguments.check) == (4, 50, 3, 0)
    assert (arguments.minbytes, arguments.maxbytes, arguments.stepfactor) == (8, 128 << 20, 2)
    case = plan_cases("all_reduce", arguments)[0]
    assert (case.dtype, case.op, case.count, case.nbytes) == ("float16", "max", 4, 8)
    stepped = planned("-b 1K -e 4K -i 1K")
    assert [case.nbytes for case in stepped if case.in_place] == [1024, 2048, 3072, 4096]


def test_every_case_is_out_of_place_and_in_place_and_holds_whole_elements() -> None:
    cases = planned("-b 1 -e 64 -f 2 -d double,int8 -o sum,max")
    assert {(case.dtype, case.op) for case in cases} == {
        (dtype, op) for dtype in ("float64", "int8") for op in ("sum", "max")
    }
    assert all(case.count >= 1 for case in cases)
    assert {case.nbytes for case in cases if case.dtype == "float64"} == {8, 16, 32, 64}
    assert len(cases) == len(set(cases)) and sum(case.in_place for case in cases) == len(cases) / 2


def test_ours_come_in_each_memory_algorithm_and_way_of_calling() -> None:
    assert labels() == ["mgpu"]
    assert labels("--memory", "both") == ["mgpu", "mgpu ordinary"]
    assert labels("--algorithm", "ring,two_shot", "--plan") == [
        "mgpu ring",
        "mgpu ring plan",
        "mgpu two_shot",
        "mgpu two_shot plan",
    ]
    assert labels("--backend", "auto,mpi", "--memory", "both") == [
        "mgpu",
        "mgpu ordinary",
        "mgpu mpi",
        "mgpu mpi ordinary",
    ]
    assert Candidate("gloo").label == "gloo"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("-b 4X", "not a size"),
        ("-f 1", "never gets to"),
        ("-d quad", "unknown datatype quad"),
        ("-o sum,xor", "unknown op xor"),
        ("-n 0", "at least 1"),
        ("-b 1 -e 2", "holds an element"),
        ("--against quics", "unknown peer"),
        ("-r 2", "unknown root 2"),
        ("--backend shn", "unknown backend shn"),
        ("--memory shared", "invalid choice"),
        ("--algorithm ring,rign", "unknown algorithm rign: choose from bidirectional_ring, "),
        ("--json nowhere/x.json", "there is no folder nowhere to write x.json into"),
    ],
)
def test_a_wrong_flag_is_a_usage_error_that_says_what_is_expected(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        all_reduce.main(arguments.split())
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_cases_of_every_collective_have_its_operations_roots_and_placements(collective: str) -> None:
    cases = planned("-n 3 -b 10 -e 1K -f 10 -o sum,max -r all -d float,int8", collective)
    ops = {"sum", "max"} if "reduce" in collective else {"none"}
    rooted = collective in ("reduce", "broadcast", "gather", "scatter")
    assert {case.op for case in cases} == ops
    assert {case.root for case in cases} == ({0, 1, 2} if rooted else {-1})
    assert {case.in_place for case in cases} == set(placements(collective))
    blocks = 1 if collective in ("all_reduce", "reduce", "broadcast", "send_recv") else 3
    itemsize = {"float32": 4, "int8": 1, "uint8": 1}
    assert all(case.nbytes == case.count * blocks * itemsize[case.dtype] for case in cases)
    if collective == "barrier":
        assert len(cases) == 1
        with pytest.raises(ValueError, match="no sizes to --plot"):
            planned("--plot x.png", collective)
    elif blocks == 3:
        with pytest.raises(ValueError, match="an element for each of 3 ranks"):
            planned("-n 3 -b 4 -e 11", collective)


def measured(collective: str, folder: Path) -> None:
    what = "-n 2 -b 8 -e 100K -f 10000 --rounds 1 --iters 2 -w 1 --memory both -r all -o max -d half"
    assert run(collective, [*what.split(), "--json", f"{folder}/x"]) == 0
    rows = json.loads((folder / "x").read_text())["rows"]
    assert {row["label"] for row in rows} == {"mgpu", "mgpu ordinary"}
    assert {row["case"]["nbytes"] for row in rows} == ({0} if collective == "barrier" else {8, 80000})
    assert all(row["case"]["collective"] == collective and row["microseconds"] > 0 for row in rows)


@pytest.mark.slow
def test_two_ranks_measure_a_gather(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured("gather", tmp_path)
    assert "# Out of bounds values : 0 OK" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("collective", sorted(COLLECTIVES.keys() - {"gather", "all_reduce"}))
def test_two_ranks_measure_every_collective(collective: str, tmp_path: Path) -> None:
    measured(collective, tmp_path)


def test_two_ranks_measure_small_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--{kind}={tmp_path}/x.{suffix}" for kind, suffix in (("json", "json"), ("csv", "csv"), ("plot", "png"))]
    what = "-n 2 -b 8 -e 1K -f 8 --memory both --plan --rounds 2 --iters 3 -w 1"
    assert all_reduce.main([*what.split(), *files]) == 0
    printed = capsys.readouterr().out
    assert "# Out of bounds values : 0 OK" in printed
    content = json.loads((tmp_path / "x.json").read_text())
    seen = {(row["label"], row["case"]["nbytes"], row["case"]["in_place"]) for row in content["rows"]}
    assert seen == {
        (f"mgpu{memory}{plan}", nbytes, in_place)
        for memory in ("", " ordinary")
        for plan in ("", " plan")
        for nbytes in (8, 64, 512)
        for in_place in (False, True)
    }
    assert all(row["microseconds"] > 0 and row["wrong"] == 0 for row in content["rows"])
    assert (tmp_path / "x.csv").read_text().count("\n") == 1 + len(content["rows"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
