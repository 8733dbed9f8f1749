"""Messages between two ranks: any size, dtype, order and tag; no order of ranks blocks inside a group; and ranks that
do block each other are told."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from crew import Crews
from expected import POISON, exact_data, same_bits
from survivors import SOON

from collectives import CollectiveError, CollectiveMismatchError, Communicator
from kernels.dtypes import DTYPES
from kernels.messages import EAGER_BYTES, SLOT_BYTES

SIZES = (
    0,
    1,
    7,
    SLOT_BYTES // 8 - 1,
    SLOT_BYTES // 8,
    SLOT_BYTES // 8 + 1,
    EAGER_BYTES // 8,
    EAGER_BYTES // 8 + 1,
    300_007,
)


def data(key: int, count: int, dtype: Any = np.float64) -> np.ndarray:
    return exact_data([key], 0, (count,), np.dtype(dtype).name)


def every_size_and_dtype(comm: Communicator) -> list[str]:
    wrong = []
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for number, (dtype, count) in enumerate(
        [(d, n) for d in DTYPES for n in (0, 1, 9, 20_011)] + [(DTYPES[0], n) for n in SIZES]
    ):
        sent = exact_data([number], comm.rank, (count,), dtype.name)
        wanted = exact_data([number], left, (count,), dtype.name)
        out = np.empty_like(sent)
        if comm.sendrecv(sent, right, out, left, tag=number % 3) is not out or not same_bits(out, wanted):
            wrong.append(f"sendrecv of {count} {dtype.name}")
        out = np.empty_like(sent)
        if comm.rank % 2:
            comm.recv(out, left)
        comm.send(sent, right)
        if comm.rank % 2 == 0:
            comm.recv(out, left)
        if not same_bits(out, wanted):
            wrong.append(f"send and recv of {count} {dtype.name}")
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_size_and_dtype(crew: Crews, size: int) -> None:
    assert crew(every_size_and_dtype, size) == [[]] * size


def in_shapes(comm: Communicator) -> list[str]:
    """Arrays of any shape and layout may be sent; what is received into must be contiguous."""
    told = []
    x = np.arange(24.0).reshape(4, 6)
    if comm.rank == 0:
        for each in (
            x[:, ::2],
            x.T,
            x[::-1],
            x[1:3],
            np.asfortranarray(x),
            np.broadcast_to(np.float64(5), (12,)),
            x[0, 0],
        ):
            comm.send(each, 1)
        frozen = x.copy()
        frozen.flags.writeable = False
        comm.send(frozen, 1)
    else:
        for each in (x[:, ::2], x.T, x[::-1], x[1:3], x, np.full(12, 5.0), x[0, 0]):
            out = np.empty(each.size).reshape(each.shape)
            if not same_bits(comm.recv(out, 0), np.asarray(each)):
                told.append(f"{each.shape}, {each.strides}")
        comm.recv(np.empty(24), 0)
        for bad in (x[:, ::2], x.T):
            try:
                comm.recv(bad, 0)
                told.append("no error")
            except ValueError as error:
                assert "C-contiguous" in str(error)
    return told


def test_shapes_and_layouts(crew: Crews) -> None:
    assert crew(in_shapes, 2) == [[], []]


def in_place(comm: Communicator) -> list[str]:
    """sendrecv from and into memory that overlaps, ordinary and symmetric: all of x is what was there before."""
    wrong, peer, count = [], 1 - comm.rank, 300_007
    for memory in np.empty(count + 10), comm.empty(count + 10, np.float64):
        for _ in range(2):
            for ahead in 0, 10:
                out, x = memory[:count], memory[ahead : ahead + count]
                x[:] = data(comm.rank, count)
                comm.barrier()
                if not same_bits(comm.sendrecv(x, peer, out, peer), data(peer, count)):
                    wrong.append(f"x {ahead} elements ahead of out")
    return wrong


def test_sendrecv_in_place(crew: Crews) -> None:
    assert crew(in_place, 2) == [[], []]


def to_no_rank(comm: Communicator) -> list[str]:
    """What is told of each call whose rank is none, after plain messages as before any."""
    x, out, told = np.ones(4), np.zeros(4), []
    for _ in range(2):
        for rank in (None, 1.0, -1, comm.size, 2**64):
            for call in (
                lambda: comm.send(x, rank),
                lambda: comm.recv(out, rank),
                lambda: comm.sendrecv(x, rank, out, 0),
                lambda: comm.sendrecv(x, 0, out, rank),
            ):
                try:
                    call()
                    told.append(f"{rank}: no error")
                except (TypeError, ValueError):
                    pass
        comm.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)
    return told


def test_a_rank_that_is_none(crew: Crews) -> None:
    assert crew(to_no_rank, 2) == [[], []]


def with_tags(comm: Communicator) -> list[float]:
    """Tags are received in any order; messages of one tag in theirs."""
    if comm.rank == 0:
        for tag in (5, 3, 5, 0, -1, 2**40):
            comm.send(np.array([float(tag)] * 1000), 1, tag=tag)
        comm.send(np.array([55.0] * 1000), 1, tag=5)
        return []
    out = np.empty(1000)
    return [float(comm.recv(out, 0, tag=tag)[999]) for tag in (2**40, 0, 5, 3, 5, -1, 5)]


def test_tags_out_of_order(crew: Crews) -> None:
    assert crew(with_tags, 2)[1] == [2.0**40, 0.0, 5.0, 3.0, 5.0, -1.0, 55.0]


def eagerly(comm: Communicator, sizes: list[int]) -> str:
    """Rank 1 receives only after rank 0 has said that it has sent: if a send waits, both wait, and are told."""
    with comm.split(0) as child:  # type: ignore[union-attr]
        try:
            if child.rank == 0:
                for nbytes in sizes:
                    child.send(np.full(nbytes, nbytes % 251, np.uint8), 1)
                child.signal(1)
            else:
                child.wait_signal(0)
                for nbytes in sizes:
                    out = child.recv(np.empty(nbytes, np.uint8), 0)
                    assert (out == nbytes % 251).all()
        except CollectiveMismatchError as error:
            return str(error)
    return ""


def the_eager_limit(comm: Communicator) -> list[Any]:
    assert comm.eager_bytes == 448 << 10
    slot, most = 64 << 10, comm.eager_bytes
    within = [[], [0] * 8, [most], [most - slot, 0], [1] * 4, [slot] * 4, [2 * slot, 4 * slot], [0, 1, 5, slot, 0]]
    beyond = [[0] * 9, [most + 1], [most - slot + 1, 0], [1] * 4 + [0], [slot + 1] * 3, [most, 0]]
    return [[eagerly(comm, sizes) for sizes in case] for case in (within, beyond)]


def test_the_eager_limit(crew: Crews) -> None:
    """It is exact, in bytes: 512 KiB for a receiver's unreceived messages, of which each header takes 64."""
    for within, beyond in crew(the_eager_limit, 2):
        assert within == [""] * len(within)
        assert all("rank 0 is in a send to rank 1, rank 1 is in a wait_signal from rank 0" in told
                   or "rank 1 is in a wait_signal from rank 0, rank 0 is in a send to rank 1" in told
                   for told in beyond), beyond  # fmt: skip


def many_unreceived(comm: Communicator) -> bool:
    """The limit counts what has not been received yet; all of it arrives."""
    if comm.rank == 0:
        for i in range(300):
            comm.send(np.full(1000, i, np.int32), 1, tag=i % 2)
        return True
    time.sleep(0.2)
    out = np.empty(1000, np.int32)
    odd = [comm.recv(out, 0, tag=1)[0] for _ in range(150)]
    even = [comm.recv(out, 0, tag=0)[0] for _ in range(150)]
    return odd == list(range(1, 300, 2)) and even == list(range(0, 300, 2))


def test_many_unreceived_messages(crew: Crews) -> None:
    assert crew(many_unreceived, 2) == [True, True]


def to_oneself(comm: Communicator) -> list[Any]:
    x = np.arange(3.0)
    comm.send(x, comm.rank, tag=1)
    x[:] = -1  # it may be used again at once
    comm.send(x, comm.rank, tag=2)
    second, first = np.empty(3), np.empty(3)
    comm.recv(second, comm.rank, tag=2)
    comm.recv(first, comm.rank, tag=1)
    both = np.empty(2)
    with comm.group():
        comm.recv(both, comm.rank)
        comm.send(np.array([7.0, 8.0]), comm.rank)
    return [first.tolist(), second.tolist(), both.tolist()]


def test_to_oneself(crew: Crews) -> None:
    assert crew(to_oneself, 2) == [[[0.0, 1.0, 2.0], [-1.0, -1.0, -1.0], [7.0, 8.0]]] * 2


def in_groups(comm: Communicator, seed: int) -> list[str]:
    """Everybody to everybody, in an order that each rank draws for itself, small and large, several per pair."""
    wrong = []
    order = random.Random(seed * 100 + comm.rank)
    for turn in range(4):
        counts = [1, 20_001, 100_003][: 3 if turn == 0 else 2]
        jobs = [(peer, i, way) for peer in range(comm.size) for i in range(len(counts)) for way in ("send", "recv")]
        shuffled = sorted(jobs, key=lambda _: order.random())
        outs = {}
        with comm.group():
            for peer, i, way in shuffled:
                if way == "send":
                    comm.send(data(1000 * comm.rank + 100 * peer + i, counts[i]), peer, tag=i)
                else:
                    outs[peer, i] = np.empty(counts[i])
                    comm.recv(outs[peer, i], peer, tag=i)
        for (peer, i), out in outs.items():
            if not same_bits(out, data(1000 * peer + 100 * comm.rank + i, counts[i])):
                wrong.append(f"turn {turn}: message {i} of {peer} to {comm.rank}")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_groups_in_any_order(crew: Crews, size: int) -> None:
    assert crew(in_groups, size, (size,)) == [[]] * size


def around_a_ring(comm: Communicator) -> float:
    """Large messages both ways at once, among collectives."""
    x = np.full(500_001, float(comm.rank))
    for _ in range(3):
        out = np.empty_like(x)
        comm.sendrecv(x, (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)
        comm.all_reduce(out, "max")
        x = out
    return float(x[-1])


def test_large_messages_around_a_ring(crew: Crews) -> None:
    assert crew(around_a_ring, 3) == [0.0, 1.0, 2.0]


def misused(comm: Communicator) -> list[str]:
    told = []

    def nested() -> None:
        with comm.group(), comm.group():
            pass

    for call in (
        lambda: comm.send(np.ones(1), 5),
        lambda: comm.recv(np.ones(1), -1),
        lambda: comm.send([1.0], 0),
        lambda: comm.send(np.ones(1), 0, tag="x"),  # type: ignore[arg-type]
        nested,
    ):
        try:
            call()
            told.append("no error")
        except (ValueError, TypeError, CollectiveError) as error:
            told.append(str(error))
    try:
        with comm.group():
            comm.send(np.ones(1), 0, tag=77)
            raise KeyError("changed my mind")
    except KeyError:
        pass
    comm.send(np.full(1, 3.0), comm.rank, tag=77)
    told.append(str(comm.recv(np.empty(1), comm.rank, tag=77)[0]))
    return told


def test_misuse(crew: Crews) -> None:
    (told,) = crew(misused, 1)
    assert told[0] == "rank 5 does not exist; this communicator has ranks 0 to 0"
    assert told[1] == "rank -1 does not exist; this communicator has ranks 0 to 0"
    assert "x is of type list; expected an array" in told[2]
    assert "tag" in told[3]
    assert "groups do not nest" in told[4]
    assert told[5] == "3.0"  # what an error left out of a group was not sent


def unlike(comm: Communicator, what: str) -> str:
    with comm.split(0) as child:  # type: ignore[union-attr]
        try:
            if child.rank == 0:
                child.send(np.ones(4, np.float32 if what == "dtype" else np.float64), 1)
            else:
                child.recv(np.empty(5 if what == "count" else 4), 0)
            child.barrier()
        except CollectiveMismatchError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["count", "dtype"])
def test_messages_unlike_what_is_expected(crew: Crews, what: str) -> None:
    for told in crew(unlike, 2, (what,)):
        assert "rank 0 sent 4 elements of float" in told and "receives them into" in told


# Plain messages, which compiled code sends and receives by itself


def long_ways(comm: Communicator, call: Callable[[], object]) -> int:
    """How many of a call's messages go through Python."""
    backend = comm._backend
    exchange, calls = backend.exchange, []
    backend.exchange = lambda *arguments: (calls.append(1), exchange(*arguments))  # type: ignore[method-assign, func-returns-value]
    try:
        call()
    finally:
        backend.exchange = exchange  # type: ignore[method-assign]
    return len(calls)


def the_short_way(comm: Communicator) -> list[str]:
    """Which plain messages go through Python, and which others do not."""
    wrong = []
    peer = 1 - comm.rank
    x, out, large = np.arange(6.0), np.empty((2, 3)), comm.zeros(100_000)
    comm.sendrecv(x, peer, out, peer)
    comm.send(x, peer), comm.recv(out, peer)
    plain: dict[str, Callable[[], object]] = {
        "sendrecv": lambda: comm.sendrecv(x, peer, out, peer, tag=-1),
        "send and recv": lambda: (comm.send(x, peer, tag=2**61), comm.recv(out, peer, tag=2**61)),
        "every dtype": lambda: [
            comm.sendrecv(np.zeros(2, dtype.numpy), peer, np.empty(2, dtype.numpy), peer) for dtype in DTYPES
        ],
        "nothing": lambda: comm.sendrecv(x[:0], peer, np.empty(0), peer),
        "0-d": lambda: comm.sendrecv(np.array(1.0), peer, np.empty(()), peer),
        "large": lambda: comm.sendrecv(large, peer, np.empty_like(large), peer),
        "read-only": lambda: comm.sendrecv(np.broadcast_to(np.float64(1), (1,)), peer, out[0, :1], peer),
    }
    other: dict[str, Callable[[], object]] = {
        "strided": lambda: comm.sendrecv(x[::2], peer, out[0], peer),
        "a scalar": lambda: comm.sendrecv(np.float64(1), peer, out[0, :1], peer),
        "a matrix": lambda: comm.sendrecv(np.ones((2, 3)).view(np.matrix), peer, out, peer),
        "NumPy's integers": lambda: comm.sendrecv(x, np.int64(peer), out, peer, tag=np.int64(3)),
        "a truth value": lambda: comm.sendrecv(x, peer, out, peer, tag=True),
        "to oneself": lambda: comm.sendrecv(x, comm.rank, out, comm.rank),
        "another type of the same size": lambda: comm.sendrecv(np.zeros(2, "q"), peer, np.zeros(2, "q"), peer),
    }
    for name, call in plain.items():
        if long_ways(comm, call):
            wrong.append(name)
    for name, call in other.items():
        if long_ways(comm, call) != 1:
            wrong.append(name)
    with comm.group():  # nothing of it is sent before its end
        if long_ways(comm, lambda: (comm.send(x, peer), comm.recv(out, peer))):
            wrong.append("in a group")
    for bad, error in (
        (lambda: comm.send(x, 2), "rank 2 does not exist"),
        (lambda: comm.send(x, -1), "rank -1 does not exist"),
        (lambda: comm.send(x, peer, tag=2**70), "is not an integer of 64 bits"),
        (lambda: comm.send(x, peer, tag=None), "is not an integer of 64 bits"),  # type: ignore[arg-type]
        (lambda: comm.send(None, peer), "x is of type NoneType"),
        (lambda: comm.recv(np.ones(3)[::2], peer), "C-contiguous"),
        (lambda: comm.recv(np.broadcast_to(np.float64(1), (1,)), peer), "read-only"),
        (lambda: comm.send(np.zeros(2, ">f8"), peer), "dtype"),
    ):
        try:
            bad()
            wrong.append(f"no {error}")
        except (ValueError, TypeError) as told:
            if error not in str(told):
                wrong.append(str(told))
    return wrong


def test_plain_messages_have_a_short_way(crew: Crews) -> None:
    assert crew(the_short_way, 2) == [[], []]


class Event(NamedTuple):
    """A message's sending or receiving, in the one order in which all ranks go through them."""

    sends: bool
    source: int
    target: int
    tag: int
    number: int  # of the message


def script(seed: int, size: int, length: int) -> tuple[list[Event], list[tuple[int, str]]]:
    """Events, and each message's bytes and dtype. Small messages wait for their receivers, up to four of a stream, and
    are overtaken by others, small and large."""
    order = random.Random(seed)
    events, kinds, unreceived = [], [], []
    for number in range(length):
        source, target = order.sample(range(size), 2)
        tag, large = order.randrange(3), order.random() < 0.2
        count = order.randrange(1, 200_000) if large else order.choice([0, 1, 2, order.randrange(3000)])
        kinds.append((count, order.choice(["float64", "float32", "uint8", "bfloat16"])))
        sent = Event(True, source, target, tag, number)
        events.append(sent)
        unreceived.append(sent)
        same = [event for event in unreceived if (event.source, event.target) == (source, target)]
        while unreceived and (len(same) == 4 or sent in unreceived and large or order.random() < 0.4):
            one = sent if large and sent in unreceived else order.choice(same if len(same) == 4 else unreceived)
            alike = [e for e in unreceived if e[:4] == one[:4]]  # which come in their order
            unreceived.remove(alike[0])
            same = [event for event in same if event in unreceived]
            events.append(alike[0]._replace(sends=False))
    return events + [event._replace(sends=False) for event in unreceived], kinds


def play(comm: Communicator, seed: int, length: int) -> list[str]:
    """Go through a script: some arrays are in symmetric memory, what has been sent is overwritten at once, and nothing
    may be written beside what is received."""
    wrong = []
    events, kinds = script(seed, comm.size, length)
    order = random.Random(seed * 100 + comm.rank)
    shared = [comm.empty(200_000 * 8 + 128, np.uint8) for _ in range(2)]
    for sends, source, target, tag, number in events:
        count, dtype = kinds[number]
        contents = exact_data([seed, number], 0, (count,), dtype)
        if comm.rank not in (source, target) or comm.rank != (source if sends else target):
            continue
        memory = shared[not sends] if order.random() < 0.5 else np.empty(contents.nbytes + 128, np.uint8)
        memory[: contents.nbytes + 128] = POISON
        array = memory[64 : 64 + contents.nbytes].view(contents.dtype)
        if sends:
            array[:] = contents
            comm.send(array, target, tag=tag)
            memory[: contents.nbytes + 128] = POISON
        else:
            comm.recv(array, source, tag=tag)
            around = memory[:64], memory[64 + contents.nbytes : contents.nbytes + 128]
            if not same_bits(array, contents) or any((each != POISON).any() for each in around):
                wrong.append(f"message {number}: {count} {dtype} of {source} to {target}, tag {tag}")
    return wrong


@pytest.mark.parametrize(
    ("size", "seeds", "length"),
    [
        (2, 3, 60),
        (4, 2, 60),
        pytest.param(2, 20, 400, marks=pytest.mark.slow),
        pytest.param(4, 10, 400, marks=pytest.mark.slow),
    ],
)
def test_random_messages(crew: Crews, size: int, seeds: int, length: int) -> None:
    for seed in range(seeds):
        assert crew(play, size, (seed, length)) == [[]] * size, f"seed {seed}"


def large_and_symmetric(comm: Communicator) -> list[str]:
    """What lies in symmetric memory is read there: both ways at once, put aside, from the memory of a communicator
    that this one was split from, and never after the send has returned."""
    wrong, peer, count = [], 1 - comm.rank, EAGER_BYTES // 8 + 1000
    x, out = comm.empty(count, np.float64), np.empty(count)
    with comm.split(0) as child:  # type: ignore[union-attr]
        for turn, way in enumerate((comm, child, comm, child)):
            x[:] = data(10 * turn + comm.rank, count)
            way.sendrecv(x, peer, out, peer)
            x[:] = -1
            if not same_bits(out, data(10 * turn + peer, count)):
                wrong.append(f"sendrecv {turn}")
        if comm.rank == 0:
            for tag in (1, 2, 3):
                x[:] = data(tag, count)
                child.send(x, 1, tag=tag)
                x[:] = -1
        else:
            for tag in (3, 1, 2):
                if not same_bits(child.recv(out, 0, tag=tag), data(tag, count)):
                    wrong.append(f"tag {tag}")
    return wrong


def test_large_messages_in_symmetric_memory(crew: Crews) -> None:
    assert crew(large_and_symmetric, 2) == [[], []]


# Ranks that block each other


CIRCLES = (
    "sends",
    "the last sends of groups",
    "receives",
    "a receive and a collective",
    "a send and a collective",
)


def circle(comm: Communicator, kind: str) -> None:
    large, out = np.ones(EAGER_BYTES // 4), np.empty(10)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if kind == "sends":
        comm.send(large, right)
    elif kind == "the last sends of groups":
        with comm.group():
            comm.send(large, right)
            comm.send(out, comm.rank)
            comm.send(out, left, tag=1) if comm.size > 2 else None
    elif kind == "receives":
        comm.recv(out, left)
    elif kind == "a receive and a collective":
        comm.recv(out, left) if comm.rank == 0 else comm.all_reduce(out)
    else:
        comm.send(large, right) if comm.rank == 0 else comm.barrier()


def circles(comm: Communicator) -> list[tuple[str, float]]:
    """What is told of each, and after how many seconds."""
    found = []
    for kind in CIRCLES:
        with comm.split(0) as child:  # type: ignore[union-attr]
            child.barrier()
            began = time.monotonic()
            try:
                circle(child, kind)
                found.append(("no error", 0.0))
            except CollectiveError as error:
                found.append((f"{type(error).__name__}: {error}", time.monotonic() - began))
        comm.barrier()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_wait_for_each_other(crew: Crews, size: int) -> None:
    for found in crew(circles, size):
        for kind, (told, seconds) in zip(CIRCLES, found):
            assert told.startswith("CollectiveMismatchError"), told
            assert "wait for each other in a circle" in told
            assert ("use sendrecv" in told) == ("send" in kind)
            assert seconds < SOON
        print(f"told after {max(seconds for _, seconds in found):.2f} s")


def innocent(comm: Communicator) -> float:
    """Long waits that look like circles, and are none: somebody is only late."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    large, out = np.full(EAGER_BYTES // 4, 1.0), np.empty(EAGER_BYTES // 4)
    total = 0.0
    for turn in range(4):
        late = turn % comm.size == comm.rank
        if late:
            time.sleep(0.6)
        if comm.rank % 2 == 0:
            comm.send(large, right)
            comm.recv(out, left)
        else:
            comm.recv(out, left)
            comm.send(large, right)
        total += float(out.sum()) / out.size
        work = comm.all_reduce(out, "max", async_op=True)
        if late:
            time.sleep(0.4)
        comm.sendrecv(large, right, out, left)
        work.wait()
    return total


def test_waiting_long_is_no_circle(crew: Crews) -> None:
    assert crew(innocent, 2) == [4.0, 4.0]
