"""What the nccl backend has beside NCCL where there are several hosts: agreement, objects, messages and small arrays,
by way of the hub, and who is gone."""

from __future__ import annotations

import gc
import os
import socket
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nccl.bindings", reason="nccl4py is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from apart import over_tcp
from over_mpi import every_collective, messages

from collectives import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, Communicator, PeerLostError
from collectives.backends.tcp import Tcp
from collectives.channel import Channel
from collectives.post import Kind, Post
from collectives.region import CLOSED
from collectives.rendezvous import Place, meet


def every_call(comm: Communicator) -> list[str]:
    with Communicator(over_tcp(comm, "aba")) as there:
        return every_collective(there)


@pytest.mark.slow
def test_every_collective_dtype_and_operation_is_as_on_one_host(crew: Any) -> None:
    assert crew(every_call, 3) == [[]] * 3


def other_calls(comm: Communicator) -> list[Any]:
    with Communicator(over_tcp(comm, "aba")) as there:
        told = messages(there)
        with there.split(0, -there.rank) as back, back.split(back.rank // 2) as half:  # type: ignore[union-attr]
            told += [family.all_reduce(np.full(3, 1.0 + comm.rank))[0] for family in (half, back)]
        large = there.all_reduce(np.arange(200_000) + comm.rank)  # of several letters
        told.append((large == 3 * np.arange(200_000) + 3).all())
        work = there.all_gather(np.array([there.rank]), async_op=True)
        told.append(there.scatter(np.arange(3) if there.rank == 1 else None, root=1, out=np.zeros(1, int))[0])
        told.append(work.wait().tolist())
    return told


def test_messages_families_and_large_arrays_are_as_on_one_host(crew: Any) -> None:
    for rank, told in enumerate(crew(other_calls, 3)):
        *_, half, back, large, scattered, gathered = told
        assert (half, back) == (1.0 if rank == 0 else 5.0, 6.0)
        assert large and scattered == rank and gathered == [0, 1, 2]
        assert told[:3] == [[], [], True]


def apart(comm: Communicator) -> list[str]:
    with Communicator(over_tcp(comm, "ab")) as there:
        word, told = there.zeros(1, np.int64), []
        for act in (lambda: there.fetch_add(word, 1, 1 - there.rank), lambda: there.all_reduce(word, algorithm="ring")):
            with pytest.raises((CollectiveError, ValueError)) as caught:
                act()
            told.append(str(caught.value))
        there.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            there.all_reduce(np.ones(3 + there.rank))
        return [*told, str(caught.value)]


def test_what_cannot_be_is_refused_on_every_rank(crew: Any) -> None:
    for told in crew(apart, 2):
        for text, part in zip(
            told, ("cannot be reached", "go one way only", "rank 1 called all_reduce(float64, count 4")
        ):
            assert part in text


def without_a_hub(comm: Communicator) -> list[str]:
    """What a family says that the hub is not in, when the hub's connections are cut."""
    engine = over_tcp(comm, "abc")
    there, told = Communicator(engine), []
    family = there.split(0 if comm.rank else None)
    comm.barrier()
    if family is None:
        for channel in list(engine.host._channels.values()):
            channel.socket.shutdown(socket.SHUT_RDWR)
    comm.barrier()
    if family is not None:
        for act in (lambda: family.all_reduce(np.ones(2)), lambda: there.recv(np.zeros(1), 3 - comm.rank)):
            with pytest.raises(PeerLostError) as caught:
                act()
            told.append(str(caught.value))
    there.abort()
    there.close()
    return told


def test_ranks_whose_letters_the_hub_carried_see_at_once_that_it_is_gone(crew: Any) -> None:
    hub, *others = crew(without_a_hub, 3)
    for told in others:
        assert "all_reduce" in told[0] and "rank 0 of the ranks that init joined (process" in told[0], told
        assert "recv" in told[1] and "rank 0 (process" in told[1], told


def to_one_that_does_not_read(comm: Communicator, sender: int) -> str:
    """What sends say when the other's thread does nothing, as in a process that is stopped."""
    engine = over_tcp(comm, "abc", timeout=1.5)
    there, told = Communicator(engine), ""
    if comm.rank == 2:
        with engine.host._news:
            comm.barrier()
            comm.barrier()
    else:
        comm.barrier()  # the other's thread reads nothing from here on
        if comm.rank == sender:
            with pytest.raises(CollectiveTimeoutError) as caught:
                there.send(np.zeros(8 << 20), 2)
            told = str(caught.value)
        comm.barrier()
    there.abort()
    there.close()
    return told


@pytest.mark.parametrize("sender", [0, 1])
def test_a_send_to_a_rank_that_does_not_read_ends_at_the_deadline(crew: Any, sender: int) -> None:
    """Nor does the hub, rank 0, keep all of it."""
    assert "send(rank 2) did not finish in" in crew(to_one_that_does_not_read, 3, (sender,))[sender]


def collected(comm: Communicator) -> list[bool]:
    """Whether a family that is dropped in a cycle, and collected as a letter is framed, is closed in the end, here and
    elsewhere."""
    with Communicator(over_tcp(comm, "aba")) as there, pytest.MonkeyPatch.context() as patched:
        family = there.split(0)
        assert family is not None
        engine: Any = family._backend
        cycle: list[Any] = [family]
        cycle.append(cycle)
        frame = Channel.frame

        def collects(channel: Channel, kind: int, payload: bytes) -> bytes:
            gc.collect()
            return frame(channel, kind, payload)

        gc.disable()
        del family, cycle
        patched.setattr(Channel, "frame", collects)
        there.barrier()
        patched.undo()
        gc.enable()
        others, deadline = (
            [seat for rank, seat in enumerate(engine.regions) if rank != comm.rank],
            time.monotonic() + 20,
        )
        while any(seat.state != CLOSED for seat in others) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [engine._closed, *(seat.state == CLOSED for seat in others)]


def test_a_communicator_may_be_collected_amid_anything(crew: Any) -> None:
    """In the thread that carries letters, and under the lock of what is to go."""
    assert crew(collected, 3) == [[True] * 3] * 3


def forked(comm: Communicator) -> int:
    """How many of this rank's connections its forked child has, too."""
    with Communicator(over_tcp(comm, "ab")) as there:
        sockets = {os.fstat(channel.fileno()).st_ino for channel in there._backend.host._channels.values()}  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            kept = 0
            for name in os.listdir("/proc/self/fd"):
                try:
                    kept += os.stat(f"/proc/self/fd/{name}").st_ino in sockets
                except OSError:
                    pass
            os._exit(kept)
        there.barrier()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_does_not_keep_connections_by_which_its_parents_death_is_seen(crew: Any) -> None:
    assert crew(forked, 2) == [0, 0]


def test_a_last_report_that_comes_when_all_have_left_is_not_minded() -> None:
    post = Post(meet(Place(0, 1, f"unix:{os.urandom(8).hex()}")))
    with Communicator(Tcp(post, [0], 10.0)) as alone:
        family = Tcp(post, [0], 10.0, (1,))
        calls = family.ledger()
        calls.begin(tuple(range(4)))
        late = calls.news()
        family.close()
        post.send(Kind.CALLS, family._id, body=late)
        alone.barrier()
        assert not post.gone
