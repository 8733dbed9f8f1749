"""The flight recorder: what every rank last did, read from shared memory by the ranks themselves, or by any other
process of the same user. It costs a run nothing: the descriptors of the last calls lie there anyway, to be compared.

A memfd has no name, but whoever may look at a process may open what it has open, /proc/PID/fd. So `mgpu doctor --run`
looks into a run that hangs, and needs nothing from it. (Keeping the last calls for the day when something hangs is the
idea of PyTorch's flight recorder.)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from collectives.call import describe
from collectives.deadlock import Doing
from collectives.host import arenas
from collectives.memory import Segment, is_sealed
from collectives.region import CLOSED, FAILED, Member, Region, region_bytes
from collectives.wording import counted

_RECENT = 3  # calls of each rank that are told


@dataclass(frozen=True)
class Seat:
    """A rank's place in one communicator of a run; arena 0 is the world's."""

    member: Member
    arena: int
    region: Region

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return os.path.exists(f"/proc/{self.member.process}")


def tell(region: Region) -> str:
    """What a rank is in, or has ended last, with the calls before."""
    begun, ended = region.calls_begun, region.calls_ended
    pages = [region.page(number) for number in range(begun, max(0, begun - _RECENT), -1)]
    last = ", after ".join(describe(page) for page in pages if page is not None)
    return f"{'is in' if begun > ended else 'has ended'} call {begun}{last and ', '}{last}"


def runs() -> dict[int, list[Seat]]:
    """The runs on this host that this user may look into, by the process id of their first rank."""
    found: dict[int, dict[tuple[int, int], Seat]] = {}
    seen = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, MemoryError):  # it has ended, is another user's, or there is no room to map its memory
            for path in Path(f"/proc/{process}/fd").iterdir():
                if os.readlink(path).startswith("/memfd:mgpu"):
                    inode = path.stat().st_ino
                    if inode not in seen:
                        seen.add(inode)
                        for seat in _seats(path):
                            found.setdefault(seat.member.run, {})[seat.member.process, seat.arena] = seat
    return {run: [seats[key] for key in sorted(seats)] for run, seats in sorted(found.items())}


def _seats(path: Path) -> list[Seat]:
    """Those who live in one rank's memory; nobody in a file that only has its name."""
    with open(path, "r+b", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        found = [(start, room, Region.member_in(file.fileno(), start)) for start, room in arenas(nbytes)]
        if not is_sealed(file.fileno()) or not any(member for _, _, member in found):
            return []
        segment = Segment(os.dup(file.fileno()), 0, 0, nbytes)
    seats = []
    for arena, (start, room, member) in enumerate(found):
        if member is not None and member.size > 0 and region_bytes(member.size) <= room:
            region = Region(segment, start, member.size)
            if arena == 0 or region.state != CLOSED:
                seats.append(Seat(member, arena, region))
    segment.close()
    return seats


def report(seats: Sequence[Seat]) -> str:
    """Where every rank of a run is, and who is late."""
    worlds = sorted((seat for seat in seats if seat.arena == 0), key=lambda seat: seat.member.rank)
    if not worlds:
        return "this run has no ranks yet"
    lines = [
        f"{counted(worlds[0].member.size, 'rank')}, of which {sum(seat.alive for seat in worlds)} live on this host"
    ]
    for world in worlds:
        lines.append(f"  rank {world.member.rank}, process {world.member.process}{_state(world)}: {_doing(world)}")
        lines += [
            f"    as rank {seat.member.rank} of {seat.member.size} in sub-communicator {seat.arena}: {_doing(seat)}"
            for seat in seats
            if seat.arena and seat.member.process == world.member.process
        ]
    furthest = max(seat.region.calls_begun for seat in worlds)
    late = [str(seat.member.rank) for seat in worlds if seat.region.calls_begun < furthest]
    if late:
        lines.append(f"  late: rank {', '.join(late)}: the others have begun call {furthest}")
    return "\n".join(lines)


def _state(seat: Seat) -> str:
    """What the system says of the process, where that is unusual."""
    try:
        state = Path(f"/proc/{seat.member.process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ", dead"
    return {"T": ", stopped", "t": ", stopped by a debugger", "Z": ", dead", "D": ", waiting for a disk"}.get(state, "")


def _doing(seat: Seat) -> str:
    region = seat.region
    text = tell(region)
    if region.state == FAILED:
        text += f"; gave up: {region.reason().get('text')}"
    elif region.state == CLOSED:
        text += "; has closed it"
    elif word := region.waiting:
        doing = Doing(word & 0xFF)
        if doing != Doing.COLLECTIVE:
            text += f"; waits in {doing.name.lower()} for rank {word >> 8 & 0xFFFF}"
    return text


def answer_signals() -> None:
    """From now on SIGUSR1 makes this process say, on standard error, where its run's ranks are and where its own
    Python code is. Leaves a handler of the user's in place."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    here = os.getpid()
    for run, seats in runs().items():
        if any(seat.member.process == here for seat in seats):
            print(f"run {run}: {report(seats)}", file=sys.stderr)
    print(f"process {here} is at:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr, flush=True)


def main(wanted: int | None) -> int:
    """`mgpu doctor --run [ID]`: print where the ranks of a run are. ID: a process of the run, its launcher or any
    rank; None for every run."""
    found = runs()
    chosen = {
        run: seats
        for run, seats in found.items()
        if wanted is None or any(wanted == run or wanted in _line(seat.member.process) for seat in seats)
    }
    for run, seats in chosen.items():
        print(f"run {run}: {report(seats)}")
    if not chosen:
        whose = "" if wanted is None else f"process {wanted} belongs to no run; "
        print(f"{whose}runs that this user may look into: {', '.join(map(str, found)) or 'none'}", file=sys.stderr)
        return 1
    print("kill -USR1 PROCESS makes a rank print where its Python code is")
    return 0


def _line(process: int) -> set[int]:
    """A process and its ancestors."""
    line = set()
    while process > 1 and process not in line:
        line.add(process)
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return line
