"""The tables that benchmarks print: nccl-tests' columns, and times by which peers are slower."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence

from bench.samples import Row, best_peer
from bench.sizes import format_size

NCCL_NAMES = {
    "float64": "double",
    "float32": "float",
    "float16": "half",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
}
LEGEND = (
    "time in us, algbw and busbw in GB/s; best: the fastest peer's time over this one's;\n"
    "# limit: the share of what memory allows, by a += b; state: cores near or far, samples"
)
_BLOCK = ("time", "algbw", "busbw", "#wrong", "best", "limit", "state")


def results(rows: Sequence[Row]) -> Iterator[str]:
    """A line per candidate and size: nccl-tests' columns, and for each placement

    - `best`: the fastest peer's time over this one's (above 1: faster than all peers);
    - `limit`: the memory limit's time over this one's (1: as fast as the memory allows);
    - `state`: the machine's, and how many samples were taken in it.

    What is the same in every line (type, redop, root) is said once, above; a column of which nothing is known is left
    out; and columns are as wide as what is in them.
    """
    cases, placed = [], []
    for (label, nbytes, count, dtype, op, root), pair in _pairs(rows).items():
        cases.append([str(nbytes), str(count), NCCL_NAMES[dtype], op, str(root), label])
        placed.append([_block(pair.get(in_place)) for in_place in (False, True)])
    titles = ["size", "count", "type", "redop", "root", "candidate"]
    same = [number for number in (2, 3, 4) if len({case[number] for case in cases}) == 1]
    if same:
        yield "# " + ", ".join(f"{titles[number]} {cases[0][number]}" for number in same)
    shown = [number for number in range(len(titles)) if number not in same]
    known = [n for n, _ in enumerate(_BLOCK) if any(block[n] != "-" for pair in placed for block in pair)]
    lines = [[titles[n] for n in shown], *([case[n] for n in shown] for case in cases)]
    blocks = [[[_BLOCK[n] for n in known]] * 2, *([[block[n] for n in known] for block in pair] for pair in placed)]
    left = _aligned(lines, names={len(shown) - 1})
    out_of_place, in_place = (_aligned([block[side] for block in blocks]) for side in (0, 1))
    yield f"# {'':{len(left[0])}}  {'out-of-place':^{len(out_of_place[0])}}  {'in-place':^{len(in_place[0])}}".rstrip()
    for number, parts in enumerate(zip(left, out_of_place, in_place, strict=True)):
        yield f"{' ' if number else '#'} {'  '.join(parts)}"


def against_peers(rows: Sequence[Row], ours: str) -> Iterator[str]:
    """For one of our candidates, out of place and in place: how many times longer each peer takes, size by size."""
    for in_place in (False, True):
        chosen = [row for row in rows if row.label == ours and row.case.in_place == in_place and row.ratios]
        if not chosen or ours in chosen[0].ratios:
            continue
        peers = list(dict.fromkeys(peer for row in chosen for peer in row.ratios))
        yield f"# {ours}, {'in' if in_place else 'out of'} place: time of each peer over ours"
        yield "# " + f"{'size':>12}" + "".join(f"{peer:>12}" for peer in peers) + f"{'best':>12}"
        for row in chosen:
            cells = "".join(f"{row.ratios[peer]:11.2f}x" if peer in row.ratios else f"{'-':>12}" for peer in peers)
            yield f"  {format_size(row.case.nbytes):>12}{cells}{best_peer(row):11.2f}x"


def columns(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """The table of a benchmark with columns of its own: the first column to the left, the others to the right."""
    cells = [list(titles), *map(list, lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(titles))]
    for number, (first, *others) in enumerate(cells):
        right = "".join(f"  {cell:>{width}}" for cell, width in zip(others, widths[1:]))
        yield f"{' ' if number else '#'} {first:{widths[0]}}{right}"


def _pairs(rows: Sequence[Row]) -> dict[tuple[str, int, int, str, str, int], dict[bool, Row]]:
    """Out of place and in place, side by side."""
    pairs: dict[tuple[str, int, int, str, str, int], dict[bool, Row]] = defaultdict(dict)
    for row in rows:
        case = row.case
        pairs[row.label, case.nbytes, case.count, case.dtype, case.op, case.root][case.in_place] = row
    # Both placements of a size come together, whichever was measured first.
    order = {key[1:]: place for place, key in reversed(list(enumerate(pairs)))}
    return dict(sorted(pairs.items(), key=lambda item: order[item[0][1:]]))


def _block(row: Row | None) -> list[str]:
    """A line's cells for one placement, `-` for what is not known."""
    if row is None:
        return ["-"] * len(_BLOCK)
    best = best_peer(row)
    return [
        significant(row.microseconds),
        f"{row.algbw:.2f}",
        f"{row.busbw:.2f}",
        str(row.wrong),
        "-" if best is None else f"{best:.2f}",
        "-" if row.of_limit is None else f"{row.of_limit:.0%}",
        f"{row.state}:{row.samples}",
    ]


def _aligned(lines: Sequence[Sequence[str]], names: Container[int] = ()) -> list[str]:
    """Lines of cells as wide as their columns need: those of `names` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        " ".join(f"{cell:{'<' if n in names else '>'}{width}}" for n, (cell, width) in enumerate(zip(line, widths)))
        for line in lines
    ]


def significant(microseconds: float) -> str:
    """As nccl-tests: two decimals below 1000 us, none from 10000 us."""
    decimals = 2 if microseconds < 1000 else 1 if microseconds < 10000 else 0
    return f"{microseconds:.{decimals}f}"
