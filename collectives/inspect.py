"""Looking at programs: a picture of one, and the commands `mgpu verify` and `mgpu predict`."""

from __future__ import annotations

import argparse
import ast
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from collectives import cost, measured
from collectives.builder import algorithms, register_from
from collectives.contract import COLLECTIVES
from collectives.lowering import build
from collectives.memory import SLOTS, parse_bytes
from collectives.program import Buffer, Move, Program, Signal
from collectives.verify import verify
from collectives.wording import counted

LEGEND = """\
3 from 1   fetches chunk 3 from rank 1         3 stays    copies chunk 3 of its input to its output
3 to 1     gives chunk 3 to rank 1             3 staged   copies chunk 3 of its input to where others see it
3 + 1      adds rank 1's share of chunk 3      !          holds all contributions now"""


def draw(program: Program) -> str:
    """A picture in text: what each rank does at each step, if every Move took the same time and signals none."""
    size = program.size
    cells: dict[tuple[int, int], str] = {}

    def move(rank: int, step: int, slice_: int, start: float) -> float:
        instruction = program.bodies[rank][step]
        assert isinstance(instruction, Move)
        cells[int(start), rank] = _short(instruction, rank, size)
        return start + 1

    cost.replay(program, 1, move, lambda from_, to: 0.0)
    steps = 1 + max((step for step, _ in cells), default=-1)
    rows = [[f"rank {rank}" for rank in range(size)]]
    rows += ([cells.get((step, rank), ".") for rank in range(size)] for step in range(steps))
    widths = [max(len(row[rank]) for row in rows) for rank in range(size)]
    lines = ["   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    numbered = [f"{'step' if k == 0 else k:>4}  {line.rstrip()}" for k, line in enumerate(lines)]
    return "\n".join(
        [f"{program.collective} by {program.algorithm}, {program.memory} memory", "", *numbered, "", LEGEND]
    )


def _short(move: Move, rank: int, size: int) -> str:
    def names(ranks: set[int]) -> str:
        return "all" if len(ranks) == size - 1 > 1 else ",".join(map(str, sorted(ranks)))

    sources = {ref.rank for ref in move.srcs} - {rank}
    targets = {ref.rank for ref in move.dsts} - {rank}
    text = str(move.chunk)
    if len(move.srcs) > 1:
        text += f" + {names(sources)}" if sources else " +"
    elif sources:
        text += f" from {names(sources)}"
    elif not targets:
        text += " staged" if all(ref.buffer is Buffer.SCRATCH for ref in move.dsts) else " stays"
    if targets:
        text += f" to {names(targets)}"
    return text + " !" * move.final


def verify_main(argv: Sequence[str]) -> int:
    """`mgpu verify`: build programs, prove them, and show them."""
    parser = argparse.ArgumentParser(prog="mgpu verify", description="Prove that a collective's programs are right.")
    _add_what(parser)
    parser.add_argument("--slots", type=int, default=2, help="slices of scratch that rotate (2)")
    parser.add_argument("--root", type=int, default=0, help="for rooted collectives (0)")
    parser.add_argument(
        "--one-slice", action="store_true", help="the shorter program for messages that fit in one slice"
    )
    parser.add_argument("--draw", action="store_true", help="show who does what at each step")
    parser.add_argument("--list", action="store_true", help="show every rank's instructions")
    chosen = parser.parse_args(argv)
    for name in _names(parser, chosen):
        for memory in ("symmetric", "staged") if chosen.memory is None else (chosen.memory,):
            start = time.perf_counter()
            more = {"memory": memory, "slots": chosen.slots, "root": chosen.root, "pipelined": not chosen.one_slice}
            program = _build(parser, chosen, name, chosen.ranks, **more)
            verify(program)
            seconds = time.perf_counter() - start
            print(
                f"{program.collective} by {program.algorithm}, {counted(chosen.ranks, 'rank')}, {memory} memory: "
                f"right. {_counts(program)}; {seconds:.2f} s"
            )
            if chosen.draw:
                print(f"\n{draw(program)}\n")
            if chosen.list:
                print(f"\n{program}\n")
    return 0


def _counts(program: Program) -> str:
    instructions = [instruction for body in program.bodies for instruction in body]
    moves = sum(isinstance(i, Move) for i in instructions)
    signals = sum(isinstance(i, Signal) for i in instructions)
    return f"{counted(moves, 'move')}, {counted(signals, 'signal')}, {counted(program.cells, 'cell')} of scratch"


def predict_main(argv: Sequence[str]) -> int:
    """`mgpu predict`: a table of times, by size and algorithm, from the model of `collectives.cost`."""
    parser = argparse.ArgumentParser(
        prog="mgpu predict",
        description="Predict how long a collective takes: a table in microseconds, with the fastest marked *.",
        epilog="A topology is a JSON file with the fields of collectives.cost.Topology; without one, -n ranks are on "
        "this machine, if mgpu tune has measured it for as many, else on one plausible host.",
    )
    _add_what(parser)
    parser.add_argument("-b", "--minbytes", type=_size, default="8", help="smallest message (8)")
    parser.add_argument("-e", "--maxbytes", type=_size, default="128M", help="largest message (128M)")
    parser.add_argument("-f", "--factor", type=int, default=16, help="from one size to the next (16)")
    parser.add_argument("--topology", help="a JSON file that says where ranks are and how fast everything is")
    parser.add_argument("--closed", action="store_true", help="by formula instead of by replay, for very many ranks")
    chosen = parser.parse_args(argv)
    found = None if chosen.topology else measured.kept(chosen.ranks)
    topology = cost.Topology.load(chosen.topology) if chosen.topology else found or cost.Topology((chosen.ranks,))
    names = _names(parser, chosen)
    if chosen.closed:
        names = [name for name in names if (chosen.collective, name) in cost.FORMS] or names
    size, last = chosen.minbytes, chosen.maxbytes
    if size < 1 or chosen.factor < 2:
        parser.error("sizes start at 1 byte, and grow by a factor of at least 2")

    @cache
    def build_once(name: str, pipelined: bool) -> Program:
        memory = chosen.memory or "symmetric"
        return _build(parser, chosen, name, topology.size, memory=memory, slots=SLOTS, pipelined=pipelined)

    if not chosen.closed:
        build_once(names[0], False)  # whatever is wrong is said before the table begins
    where = _where(chosen, topology, found is not None)
    print(f"{chosen.collective}, {counted(topology.size, 'rank')} on {where}: microseconds")
    print(f"{'bytes':>12}" + "".join(f"{name:>20}" for name in names))
    while size <= last:
        times = [_time(chosen, name, size, topology, build_once) for name in names]
        row = "".join(f"{t * 1e6:>19.1f}{'*' if t == min(times) and len(times) > 1 else ' '}" for t in times)
        print(f"{size:>12}{row.rstrip()}", flush=True)
        size *= chosen.factor
    return 0


def _where(chosen: argparse.Namespace, topology: cost.Topology, tuned: bool) -> str:
    if len(topology.hosts) > 1:
        return f"{len(topology.hosts)} hosts"
    if tuned:
        return "this machine, as mgpu tune measured it"
    return "one host" if chosen.topology else f"a plausible host (mgpu tune -n {topology.size} measures this one)"


def _build(parser: argparse.ArgumentParser, chosen: argparse.Namespace, name: str, size: int, **more: Any) -> Program:
    try:
        return build(chosen.collective, name, size, **more, **dict(chosen.option))
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def _time(
    chosen: argparse.Namespace,
    name: str,
    nbytes: int,
    topology: cost.Topology,
    build_once: Callable[[str, bool], Program],
) -> float:
    if chosen.closed:
        return cost.closed_form(chosen.collective, name, nbytes, topology)
    short = build_once(name, False)
    return cost.predict(short if cost.slices_of(short, nbytes) == 1 else build_once(name, True), nbytes, topology)


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("collective", choices=sorted(COLLECTIVES))
    parser.add_argument("algorithm", nargs="?", help="one of the collective's algorithms (all of them)")
    parser.add_argument("-n", "--ranks", type=int, default=4, help="number of ranks (4)")
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        metavar="FILE.py|MODULE",
        dest="imports",
        help="where algorithms of your own are registered",
    )
    parser.add_argument("--memory", choices=["symmetric", "staged"], help="what ranks can see of each other's memory")
    parser.add_argument(
        "-o", "--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="of the algorithm"
    )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _names(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> list[str]:
    for place in chosen.imports:
        register_from(place)
    known = sorted(algorithms(chosen.collective))
    if chosen.algorithm is None:
        return known
    if chosen.algorithm not in known:
        parser.error(f"no {chosen.collective} algorithm is called {chosen.algorithm!r}; there are {', '.join(known)}")
    return [chosen.algorithm]
