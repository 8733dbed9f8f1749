"""How long a program takes: a model of time, and a replay of the instruction lists under it.

The model is R. Hockney's, alpha + beta n, with gamma for arithmetic (as in R. Thakur, R. Rabenseifner and W. Gropp,
"Optimization of collective communication operations in MPICH", 2005), and with two kinds of distance: ranks of one
host load and store each other's memory, ranks of different hosts share their hosts' networks. The bandwidth of memory
depends on how much of it a call touches, since what fits in a cache is several times faster, and what does not is
limited by what all ranks of a host together get from memory.

`predict` plays the same lists that are proven and run, and so knows of pipelining, of credits and of who waits for
whom. For the usual algorithms there are closed forms as well, for numbers of ranks beyond what one wants to play.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from collectives.contract import geometry
from collectives.memory import LINE, slot_bytes
from collectives.program import Buffer, Enter, Move, Program, Ref, Signal, Wait
from collectives.wording import counted

MOST_SLICES = 24  # more than these are not replayed one by one: each takes as long as the one before

Seconds = float


RATES = ("own", "peer", "together", "again")  # the fields of a topology that depend on how much memory is touched


@dataclass(frozen=True)
class Rate:
    """Bytes per second, by how many bytes a call touches: points between which is interpolated on logarithmic axes."""

    points: tuple[tuple[float, float], ...]

    def at(self, footprint: float) -> float:
        sizes, rates = np.log(np.array(self.points)).T
        return float(np.exp(np.interp(math.log(max(footprint, 1.0)), sizes, rates)))

    def load(self, footprint: float) -> Seconds:
        """What a byte takes that is loaded, or stored where it was loaded before."""
        return 1 / self.at(footprint)

    def store(self, footprint: float) -> Seconds:
        """What a byte takes that is stored where it was not: such a line is loaded first, which takes time where it
        comes from memory; a cache does it beside other work."""
        return 2 / self.at(footprint) - 1 / self.at(1)


@dataclass(frozen=True)
class Topology:
    """Where ranks are, and how fast they and the ways between them are. The defaults are a plausible server."""

    hosts: tuple[int, ...]  # how many ranks are on each host, which are numbered one after another
    cores: int = 64  # of each host; ranks that outnumber them take turns
    latency: Seconds = 200e-9  # from a signal to the waiting rank's going on, within a host
    overhead: Seconds = 60e-9  # of a Move, however small
    own: Rate = Rate(((1, 20e9),))  # at which a rank loads or stores its own memory
    peer: Rate = Rate(((1, 15e9),))  # at which it loads or stores that of another rank of its host
    together: Rate = Rate(((1, math.inf),))  # at which all ranks of a host together load and store
    again: Rate | None = None  # at which all at once store where they have loaded in the same Move; None: as they load
    arithmetic: float = 40e9  # bytes of operands a rank reduces in a second
    network_latency: Seconds = 5e-6  # from a signal to the waiting rank's going on, between hosts
    network: float = 12e9  # bytes per second that a host sends, and as many that it receives

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read a topology from a file: see `parse`."""
        return cls.parse(Path(path).read_text(), str(path))

    @classmethod
    def parse(cls, text: str, name: str = "topology") -> Topology:
        """A topology from JSON: the fields of this class, rates as one number or a list of [bytes, rate] pairs.

        `name` is for errors: ValueError where it is none.
        """
        fields = json.loads(text)
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown or "hosts" not in fields:
            problem = f"does not know {', '.join(unknown)}" if unknown else "needs hosts, the number of ranks on each"
            raise ValueError(f"{name}: a topology {problem}; it has {', '.join(cls.__dataclass_fields__)}")
        if fields.get("again", 0) is None:
            del fields["again"]
        for rate in RATES:
            if rate in fields:
                points = fields[rate] if isinstance(fields[rate], list) else [[1, fields[rate]]]
                fields[rate] = Rate(tuple((float(size), float(speed)) for size, speed in points))
        return cls(**{**fields, "hosts": tuple(fields["hosts"])})

    def text(self) -> str:
        """The JSON that `parse` reads."""
        fields = asdict(self)
        for rate in RATES:
            fields[rate] = fields[rate] and fields[rate]["points"]
        return json.dumps(fields, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write what `load` reads."""
        Path(path).write_text(self.text())

    @property
    def size(self) -> int:
        return sum(self.hosts)

    def host_of(self) -> list[int]:
        """Each rank's host."""
        return [host for host, ranks in enumerate(self.hosts) for _ in range(ranks)]


def predict(
    program: Program, nbytes: int, topology: Topology, *, in_place: bool = False, slot: int | None = None
) -> Seconds:
    """The time from when all ranks call to when the last is through.

    `nbytes`: the size of the array that a rank holds, the longer of input and output (as nccl-tests counts).
    `in_place`: whether a chunk's places in input and output are one. Scratch has slots of `slot` bytes, or as the shm
    backend's. Raises ValueError if the topology has another number of ranks,
    or if the message takes several slices and the program is for one.
    """
    if topology.size != program.size:
        raise ValueError(f"the topology has {counted(topology.size, 'rank')}, the program {program.size}")
    lengths, step, slices = _cut(program, nbytes, slot)
    if slices > 1 and not program.pipelined:
        raise ValueError(f"{nbytes} bytes take {slices} slices, and {program!r} is for one")
    costs = _Costs(program, topology, lengths, step, slices, in_place)
    played = min(slices, MOST_SLICES)

    def move(rank: int, at: int, slice_: int, start: Seconds) -> Seconds:
        chunk = program.bodies[rank][at].chunk  # type: ignore[union-attr]
        return costs.move(rank, at, slice_, min(step, lengths[chunk] - slice_ * step), start)

    ends = replay(program, played, move, costs.signal)
    if slices == played:
        return ends[-1]
    # once the pipeline is full, every slice takes as long as the one before
    return ends[-1] + (max(lengths) / step - played) * (ends[-1] - ends[played // 2 - 1]) / (played - played // 2)


def slices_of(program: Program, nbytes: int, slot: int | None = None) -> int:
    """In how many slices a message goes."""
    return _cut(program, nbytes, slot)[2]


def _cut(program: Program, nbytes: int, slot: int | None) -> tuple[list[int], int, int]:
    """Every chunk's bytes, the bytes of a chunk in a slice, and the number of slices."""
    contract = program.contract
    count = nbytes // program.size if contract.terms.axes else nbytes
    lengths = geometry(contract, 0 if program.collective == "barrier" else count).lengths.tolist()
    longest = max(lengths, default=0)
    slot = slot_bytes(program.size) if slot is None else slot
    step = max(LINE, slot // program.cells // LINE * LINE) if program.cells else max(1, longest)
    return lengths, step, max(1, -(-longest // step))


def replay(
    program: Program,
    slices: int,
    move: Callable[[int, int, int, Seconds], Seconds],
    signal: Callable[[int, int], Seconds],
) -> list[Seconds]:
    """Play all ranks' lists; returns when each slice ends on the last rank.

    `move(rank, step, slice, start)` gives the time at which a Move ends, and is asked about in the order of starts;
    `signal(from, to)` how long a signal takes.
    """
    size, bodies = program.size, program.bodies
    signals_in = [program.signals_in(rank).tolist() for rank in range(size)]
    given: dict[tuple[int, int], list[Seconds]] = defaultdict(list)  # by (from, to)
    waiting: dict[int, tuple[int, int]] = {}  # rank -> (peer, how many signals of that peer)
    entered: dict[int, Seconds] = {}
    clock = [0.0] * size
    at = [(0, 0)] * size  # (slice, step) of each rank
    ends = [0.0] * slices
    ready = [(0.0, rank) for rank in range(size)]

    def go_on(rank: int, when: Seconds) -> None:
        clock[rank] = when
        heapq.heappush(ready, (when, rank))

    while ready:
        now, rank = heapq.heappop(ready)
        slice_, step = at[rank]
        body = bodies[rank]
        while slice_ < slices:
            if step == len(body):
                ends[slice_] = max(ends[slice_], now)
                slice_, step = slice_ + 1, 0
                continue
            instruction = body[step]
            if isinstance(instruction, Signal):
                peer = instruction.peer
                given[rank, peer].append(now)
                if waiting.get(peer) == (rank, len(given[rank, peer])):
                    del waiting[peer]
                    go_on(peer, max(clock[peer], now + signal(rank, peer)))
            elif isinstance(instruction, Wait) and slice_ >= instruction.lag:
                peer = instruction.peer
                count = (slice_ - instruction.lag) * signals_in[rank][peer] + instruction.signal
                if len(given[peer, rank]) < count:
                    waiting[rank] = peer, count
                    clock[rank] = now
                    break
                now = max(now, given[peer, rank][count - 1] + signal(peer, rank))
            elif isinstance(instruction, Enter) and slice_ == 0:
                entered[rank] = now
                if len(entered) == size:
                    for other in range(size):
                        go_on(other, max(entered[q] + (signal(q, other) if q != other else 0.0) for q in range(size)))
                step += 1
                break
            elif isinstance(instruction, Move):
                go_on(rank, move(rank, step, slice_, now))
                step += 1
                break
            step += 1
        at[rank] = slice_, step
    return ends


class _Costs:
    """What Moves and signals cost under a topology.

    `lengths`: every chunk's bytes; `step`: those of a chunk in one of the `slices`.
    """

    def __init__(
        self, program: Program, topology: Topology, lengths: list[int], step: int, slices: int, in_place: bool
    ) -> None:
        self.program, self.topology, self.in_place = program, topology, in_place
        self.host = topology.host_of()
        self.crowd = [max(1.0, ranks / topology.cores) for ranks in topology.hosts]
        self.network = _Shared(len(topology.hosts)), _Shared(len(topology.hosts))  # what hosts send and receive
        self.memory = _Shared(len(topology.hosts))
        # What is touched before a slot of scratch is used again: as many slices of everything as there are slots.
        turns = max(topology.hosts) * min(slices, program.slots) * step
        self.whole = self._touched(lengths) + turns * program.cells
        self.turn = min(self.whole, turns * (program.cells + program.chunks))
        self.visits: set[tuple[int, int, tuple[int, int, int]]] = set()  # (rank, slice, place), in this call
        self.own, self.peer, self.together = map(self._prices, (topology.own, topology.peer, topology.together))
        again = topology.again
        self.again = None if again is None else (again.load(self.whole), again.load(self.turn))

    def signal(self, from_: int, to: int) -> Seconds:
        if self.host[from_] != self.host[to]:
            return self.topology.network_latency
        return self.topology.latency * self.crowd[self.host[to]]

    def move(self, rank: int, step: int, slice_: int, length: int, start: Seconds) -> Seconds:
        """When a Move of `length` bytes ends that could start at `start`."""
        instruction = self.program.bodies[rank][step]
        assert isinstance(instruction, Move)
        if length <= 0:
            return start
        topology, here = self.topology, self.host[rank]
        alone, together, end = (len(instruction.srcs) - 1) / topology.arithmetic, 0.0, start
        loaded, visits = set(map(self._memory, instruction.srcs)), []
        copies = len(instruction.srcs) == 1
        dsts = [ref for ref in instruction.dsts if not (copies and self._memory(ref) in loaded)]  # it is there already
        if not dsts:
            return start
        for ref, stores in (*((ref, False) for ref in instruction.srcs), *((ref, True) for ref in dsts)):
            there = self.host[ref.rank]
            if there == here:
                fresh = stores and self._memory(ref) not in loaded
                visit = rank, slice_, self._memory(ref)
                recent = ref.buffer is Buffer.SCRATCH or visit in self.visits
                visits.append(visit)
                if stores and not fresh and self.again is not None:
                    alone += self.again[recent]
                    together += self.again[recent] / topology.hosts[here]
                    continue
                alone += (self.own if ref.rank == rank else self.peer)[recent][fresh]
                together += self.together[recent][fresh]
                continue
            seconds = length / topology.network
            sends, receives = self.network
            sender, receiver = (here, there) if stores else (there, here)
            end = max(end, sends.take(sender, start, seconds), receives.take(receiver, start, seconds))
        self.visits.update(visits)
        end = max(end, start + length * alone * self.crowd[here], self.memory.take(here, start, length * together))
        return topology.overhead * self.crowd[here] + end

    def _memory(self, ref: Ref) -> tuple[int, int, int]:
        """What tells a place's memory from others'."""
        return Buffer.OUTPUT if self.in_place and ref.buffer is Buffer.INPUT else ref.buffer, ref.rank, ref.place

    def _prices(self, rate: Rate) -> tuple[tuple[Seconds, Seconds], ...]:
        """What a byte takes, by whether it was used recently and whether it is stored afresh."""
        return tuple((rate.load(footprint), rate.store(footprint)) for footprint in (self.whole, self.turn))

    def _touched(self, lengths: list[int]) -> int:
        """The most bytes of arrays that the program touches on one host."""
        moves = (step for body in self.program.bodies for step in body if isinstance(step, Move))
        places = {self._memory(ref) for move in moves for ref in (*move.srcs, *move.dsts)}
        touched = [0] * len(self.crowd)
        for buffer, rank, place in places:
            if buffer != Buffer.SCRATCH:
                touched[self.host[rank]] += lengths[place]
        return max(touched)


class _Shared:
    """Something that each host has one of, for one at a time."""

    def __init__(self, hosts: int) -> None:
        self._free = [0.0] * hosts  # from when on

    def take(self, host: int, start: Seconds, seconds: Seconds) -> Seconds:
        """Use it for so long, from `start` on at the earliest; returns the end."""
        self._free[host] = max(start, self._free[host]) + seconds
        return self._free[host]


# --- closed forms -----------------------------------------------------------------------------------------------------


class _Equal:
    """Equal ranks on equal hosts, and what a step costs there. Memory is symmetric.

    p ranks, `together` of them on each of `hosts` hosts; n bytes.
    """

    def __init__(self, topology: Topology, nbytes: float) -> None:
        self.p, self.n = topology.size, nbytes
        self.hosts, self.together = len(topology.hosts), topology.hosts[0]
        self.rounds = (self.p - 1).bit_length()
        crowd = max(1.0, self.together / topology.cores)
        footprint = self.together * nbytes
        self._overhead = topology.overhead * crowd
        self._own, self._peer = crowd / topology.own.at(footprint), crowd / topology.peer.at(footprint)
        self._shared = self.together / topology.together.at(footprint)
        self._arithmetic = crowd / topology.arithmetic
        self._network = 1 / topology.network
        self.near, self.far = topology.latency * crowd, topology.network_latency
        self.alpha = self.near if self.hosts == 1 else self.far

    def move(self, nbytes: float, own: int, peer: int, operands: int = 1, far: int = 0) -> Seconds:
        """A Move that names `own` places of its own rank, `peer` of others on its host, `far` of others elsewhere."""
        local = own * self._own + peer * self._peer + (operands - 1) * self._arithmetic
        return self._overhead + nbytes * max(local, (own + peer) * self._shared, far * self.together * self._network)

    def meet(self, nbytes: float, own: int, others: int, operands: int = 1) -> Seconds:
        """A Move where all others are on this host, or all elsewhere."""
        near, far = (others, 0) if self.hosts == 1 else (0, others)
        return self.move(nbytes, own, near, operands, far)

    def reduce(self, nbytes: float) -> Seconds:
        """Add what a peer has to what the rank has itself, and signal."""
        return self.meet(nbytes, own=2, others=1, operands=2) + self.alpha

    def copy(self, nbytes: float) -> Seconds:
        """Fetch what a peer has, and signal."""
        return self.meet(nbytes, own=1, others=1) + self.alpha

    def fan_out(self, nbytes: float) -> Seconds:
        """All others fetch what one rank has."""
        return max(self.meet(nbytes, own=1, others=1), (self.hosts - 1) * nbytes * self._network)


def _ring(m: _Equal) -> Seconds:
    if m.p == 2:
        return _two_shot(m)  # the second of its two steps is pushed by the first
    return m.alpha + (m.p - 1) * (m.reduce(m.n / m.p) + m.copy(m.n / m.p))


def _two_shot(m: _Equal) -> Seconds:
    return m.alpha + m.meet(m.n / m.p, own=2, others=2 * (m.p - 1), operands=m.p) + m.alpha


def _one_shot(m: _Equal) -> Seconds:
    return m.meet(m.n, own=2, others=0) + m.alpha + m.meet(m.n, own=2, others=m.p - 1, operands=m.p)


def _halving_doubling(m: _Equal) -> Seconds:
    if m.p == 2:
        return _two_shot(m)
    moves = (m.p - 1) * (m.reduce(m.n / m.p) + m.copy(m.n / m.p) - 2 * m.alpha)
    return m.alpha + moves + 2 * m.rounds * m.alpha


def _hierarchical(m: _Equal) -> Seconds:
    """One group a host, directly inside, along a ring between. Every rank leads for `hosts` of the p chunks."""
    chunk, copies = m.n / m.p, m.hosts * (m.together - 1)
    inside = m.hosts * m.move(chunk, own=2, peer=m.together - 1, operands=m.together) + m.near
    between = m.move(chunk, own=2, peer=0, operands=2, far=1) + m.move(chunk, own=1, peer=0, far=1) + 2 * m.far
    return m.far + inside + (m.hosts - 1) * between + copies * m.move(chunk, own=1, peer=1) + m.near


def _direct_all_gather(m: _Equal) -> Seconds:
    return m.alpha + m.meet(m.n / m.p, own=2, others=m.p - 1) + m.alpha


def _ring_all_gather(m: _Equal) -> Seconds:
    if m.p == 2:
        return _direct_all_gather(m)
    return m.alpha + m.meet(m.n / m.p, own=2, others=0) + (m.p - 1) * m.copy(m.n / m.p)


FORMS: dict[tuple[str, str], Callable[[_Equal], Seconds]] = {
    ("all_reduce", "ring"): _ring,
    ("all_reduce", "two_shot"): _two_shot,
    ("all_reduce", "one_shot"): _one_shot,
    ("all_reduce", "halving_doubling"): _halving_doubling,
    ("all_reduce", "hierarchical"): _hierarchical,
    ("reduce_scatter", "ring"): lambda m: m.alpha + (m.p - 1) * m.reduce(m.n / m.p),
    ("reduce_scatter", "direct"): lambda m: m.alpha + m.meet(m.n / m.p, 2, m.p - 1, m.p) + m.alpha,
    ("all_gather", "ring"): _ring_all_gather,
    ("all_gather", "direct"): _direct_all_gather,
    ("all_to_all", "direct"): lambda m: (
        m.alpha + m.meet(m.n / m.p, 2, 0) + (m.p - 1) * m.meet(m.n / m.p, 1, 1) + m.alpha
    ),
    ("broadcast", "direct"): lambda m: m.alpha + m.fan_out(m.n) + m.alpha,
    ("broadcast", "chain"): lambda m: m.alpha + (m.p - 1) * m.copy(m.n),
}


def closed_form(collective: str, algorithm: str, nbytes: int, topology: Topology) -> Seconds:
    """The same time by a formula, in symmetric memory; all_reduce by "hierarchical" with one group a host. Whatever is
    stored counts as if it had been loaded (see `Rate.store`).

    Raises ValueError where there is no formula, or where it does not hold: hosts must be equal, and, but for
    "hierarchical", all ranks on one host or each on its own.
    """
    if (collective, algorithm) not in FORMS:
        known = ", ".join(f"{c} {a}" for c, a in FORMS)
        raise ValueError(f"there is no closed form for {collective} by {algorithm}; there is for {known}")
    ranks, *others = set(topology.hosts)
    if others or (algorithm != "hierarchical" and ranks > 1 and len(topology.hosts) > 1):
        raise ValueError(
            f"the closed form for {algorithm} does not hold for ranks on hosts like these: {topology.hosts}"
        )
    return FORMS[collective, algorithm](_Equal(topology, nbytes))
