"""nccl-tests' columns, in lines that fit."""

from bench.candidates import LIMIT
from bench.case import Case
from bench.samples import Sample, summarise
from bench.table import against_peers, columns, results


def rows() -> list:
    samples = []
    for nbytes in (8, 1 << 20):
        for in_place in (False, True):
            case = Case("all_reduce", nbytes, nbytes // 4, "float32", "sum", -1, in_place)
            for label, us in (("mgpu", nbytes / 1e4 + 1), ("gloo", nbytes / 1e4 + 3)):
                samples.append(Sample(label, case, 0, 100.0, 100.0, 20, us, 0))
    return summarise(samples, 2, ["mgpu", "gloo"], ["gloo"])


def test_a_line_per_candidate_and_size_with_both_placements() -> None:
    same, heading, names, *lines = results(rows())
    assert same == "# type float, redop sum, root -1"
    assert "out-of-place" in heading and "in-place" in heading
    block = "time algbw busbw #wrong best state"  # nobody knows the limit
    assert names.split() == f"# size count candidate {block} {block}".split()
    assert [line.split()[2] for line in lines] == ["mgpu", "gloo", "mgpu", "gloo"]
    first = lines[0].split()
    assert first[:3] == ["8", "2", "mgpu"]
    assert first[3:] == ["1.00", "0.01", "0.01", "0", "3.00", "near:1"] * 2
    assert lines[2].split()[0] == "1048576"
    assert len({len(line) for line in lines} | {len(names)}) == 1


def test_what_differs_has_a_column() -> None:
    case = Case("all_reduce", 8, 1, "float64", "max", -1, False)
    other = [*rows(), *summarise([Sample("mgpu", case, 0, 100.0, 100.0, 20, 1.0, 0)], 2, ["mgpu"], [])]
    same, _, names, *lines = results(other)
    assert same == "# root -1" and names.split()[:6] == "# size count type redop candidate".split()
    assert [line.split()[2:4] for line in lines] == [["float", "sum"]] * 4 + [["double", "max"]]


def test_a_line_fits_where_sizes_and_times_are_large_and_all_is_known() -> None:
    samples = []
    for in_place in (False, True):
        case = Case("all_reduce", 128 << 20, 32 << 20, "float32", "sum", -1, in_place)
        for label, us in (("mgpu", 16900.0), ("openmpi", 127000.0), (LIMIT, 12000.0)):
            samples += [Sample(label, case, n, 100.0, 100.0, 20, us, 0) for n in range(7)]
    lines = list(results(summarise(samples, 2, ["mgpu"], ["openmpi"])))
    assert "limit" in lines[2] and "best" in lines[2] and max(map(len, lines)) <= 120


def test_a_missing_placement_is_a_row_of_dashes() -> None:
    only_in_place = [row for row in rows() if row.case.in_place]
    *_, line = results(only_in_place)
    assert line.split()[3:9] == ["-"] * 6 and line.split()[9] != "-"


def test_times_against_peers_are_for_ours_out_of_place_and_in_place() -> None:
    lines = list(against_peers(rows(), "mgpu"))
    assert "out of place" in lines[0] and "in place" in lines[4] and len(lines) == 8
    for _, names, small, large in (lines[:4], lines[4:]):
        assert names.split() == ["#", "size", "gloo", "best"]
        assert small.split() == ["8", "3.00x", "3.00x"]
        assert large.split()[0] == "1M"
    assert list(against_peers(rows(), "gloo")) == []  # a peer is not held against itself


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert list(columns(["name", "us"], [["a", "1.5"], ["longer", "1000.0"]])) == [
        "# name        us",
        "  a          1.5",
        "  longer  1000.0",
    ]
