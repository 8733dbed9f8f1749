"""The tables that benchmarks print: nccl-tests' columns, and times by which peers are slower."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

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
    "best: the fastest peer's time over this one's; limit: the share of what memory allows, by a += b; "
    "state: cores near or far, samples"
)
_CASE = "{:>12} {:>12} {:>9} {:>7} {:>5}  "
_BLOCK = "{:>9} {:>7} {:>7} {:>6} {:>6} {:>6} {:>8}"


def results(rows: Sequence[Row]) -> Iterator[str]:
    """A line per candidate and size: nccl-tests' columns, and for each placement

    - `best`: the fastest peer's time over this one's (above 1: faster than all peers);
    - `limit`: the memory limit's time over this one's (1: as fast as the memory allows);
    - `state`: the machine's, and how many samples were taken in it.
    """
    width = max([9, *(len(row.label) for row in rows)])
    block = " ".join(["{}"] * 2)
    placements = "  ".join(f"{title:^{len(_block())}}" for title in ("out-of-place", "in-place"))
    names = _CASE.format("size", "count", "type", "redop", "root")
    titles = _BLOCK.format("time", "algbw", "busbw", "#wrong", "best", "limit", "state")
    units = _BLOCK.format("(us)", "(GB/s)", "(GB/s)", "", "(x)", "", "")
    empty = " " * len(names)
    yield f"# {empty}{'':{width}} {placements}"
    yield f"# {names}{'candidate':{width}} {block.format(titles, ' ' + titles)}"
    yield f"# {_CASE.format('(B)', '(elements)', '', '', '')}{'':{width}} {block.format(units, ' ' + units)}"
    for (label, nbytes, count, dtype, op, root), pair in _pairs(rows).items():
        what = _CASE.format(nbytes, count, NCCL_NAMES[dtype], op, root)
        yield f"  {what}{label:{width}} {block.format(_block(pair.get(False)), ' ' + _block(pair.get(True)))}"


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


def _block(row: Row | None = None) -> str:
    if row is None:
        return _BLOCK.format(*["-"] * 7)
    best = best_peer(row)
    return _BLOCK.format(
        significant(row.microseconds),
        f"{row.algbw:.2f}",
        f"{row.busbw:.2f}",
        row.wrong,
        "-" if best is None else f"{best:.2f}",
        "-" if row.of_limit is None else f"{row.of_limit:.0%}",
        f"{row.state}:{row.samples}",
    )


def significant(microseconds: float) -> str:
    """As nccl-tests: two decimals below 1000 us, none from 10000 us."""
    decimals = 2 if microseconds < 1000 else 1 if microseconds < 10000 else 0
    return f"{microseconds:.{decimals}f}"
