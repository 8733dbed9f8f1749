"""How ranks meet: in any order, over Unix sockets and TCP, with strangers at the door, with ranks that die."""

import contextlib
import dataclasses
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from collectives import channel, rendezvous
from collectives.door import Door
from collectives.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from collectives.place import abstract, endpoint
from collectives.rendezvous import Meeting, Place, meet

SECRET = b"known to this job only"


def unix(size, **changes):
    """Places of one job on one host."""
    address = f"unix:{secrets.token_hex(8)}"
    return [Place(rank, size, address, **{"secret": SECRET, "timeout": 20.0, **changes}) for rank in range(size)]


def tcp(size, hosts=None, **changes):
    """Places of one job that meets over TCP; hosts[rank] is what each rank says its host is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    hosts = hosts or ["one"] * size
    changes = {"secret": SECRET, "timeout": 20.0, **changes}
    return [Place(rank, size, address, host=host, **changes) for rank, host in enumerate(hosts)]


def together(functions):
    """Run each function in a thread of its own; results or exceptions, in order."""
    results = [None] * len(functions)

    def run(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
        while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # joined is not yet gone
            time.sleep(0.001)
    return results


def each(places, job, delay=lambda rank: 0.0):
    """What job(meeting) returns on each rank, or the exception."""

    def rank_of(place):
        def run():
            time.sleep(delay(place.rank))
            meeting = meet(place)
            try:
                return job(meeting)
            finally:
                meeting.close()

        return run

    return together([rank_of(place) for place in places])


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_left():
    before = descriptors()
    yield
    assert descriptors() == before


PROCESS = """
import sys, time
{prelude}
from collectives.rendezvous import Place, meet
rank, size, address, host, doing = sys.argv[1:]
meeting = meet(Place(int(rank), int(size), address, {secret!r}, host or None, 30.0))
print("met", flush=True)
if doing == "exchanges":
    while True:
        meeting.exchange(b"x")
time.sleep(60)
"""


@contextlib.contextmanager
def process(place, doing="sleeps", prelude=""):
    """A rank in a process of its own."""
    script = PROCESS.format(secret=place.secret, prelude=prelude)
    argv = [str(place.rank), str(place.size), place.address, place.host or "", doing]
    child = subprocess.Popen([sys.executable, "-c", script, *argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# Meeting and exchanging


@pytest.mark.parametrize("make", [unix, tcp])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_all_ranks_meet_in_any_order_and_exchange(make, size):
    def job(meeting):
        sent = [secrets.token_bytes(random.choice([0, 1, 100, 5000])) for _ in range(5)]
        return sent, [meeting.exchange(data) for data in sent]

    results = each(make(size), job, delay=lambda rank: random.random() / 10)
    for number in range(5):
        expected = [sent[number] for sent, _ in results]
        assert all(received[number] == expected for _, received in results)


def test_ranks_of_several_hosts_pass_descriptors_within_each():
    hosts = ["a", "b", "a", "c", "b", "a"]

    def job(meeting):
        fd = os.memfd_create(str(meeting.rank))
        os.write(fd, f"rank {meeting.rank}".encode())
        found = meeting.exchange_fd(fd)
        os.close(fd)
        texts = [fd is not None and os.pread(fd, 100, 0).decode() for fd in found]
        for fd in found:
            if fd is not None:
                assert not os.get_inheritable(fd)
                os.close(fd)
        assert [peer.local for peer in meeting.peers] == [host == hosts[meeting.rank] for host in hosts]
        assert [peer.host for peer in meeting.peers] == hosts
        assert [peer.pidfd is not None for peer in meeting.peers] == [
            peer.local and peer.rank != meeting.rank for peer in meeting.peers
        ]
        meeting.exchange(b"")
        return texts

    results = each(tcp(6, hosts), job)
    for rank, texts in enumerate(results):
        assert texts == [host == hosts[rank] and f"rank {other}" for other, host in enumerate(hosts)]


def test_on_one_host_everybody_gets_everybody_s_descriptor_again_and_again():
    def job(meeting):
        for _ in range(3):
            reader, writer = os.pipe()
            found = meeting.exchange_fd(writer)
            for fd in found:
                os.write(fd, bytes([meeting.rank]))
                os.close(fd)
            meeting.exchange(b"")
            assert sorted(os.read(reader, 100)) == list(range(meeting.size))
            os.close(reader)
            os.close(writer)
        return [peer.pid for peer in meeting.peers]

    assert each(unix(4), job) == [[os.getpid()] * 4] * 4


def test_payloads_are_bounded():
    def job(meeting):
        with pytest.raises(ValueError, match="1,048,577 bytes are too many"):
            meeting.exchange(bytes(rendezvous.MAX_PAYLOAD + 1))
        return [len(data) for data in meeting.exchange(bytes(rendezvous.MAX_PAYLOAD - meeting.rank))]

    sizes = [rendezvous.MAX_PAYLOAD - rank for rank in range(3)]
    assert each(unix(3), job) == [sizes] * 3


def test_a_job_may_meet_again_at_the_same_address():
    places = unix(3)
    for round_ in range(5):
        assert each(places, lambda meeting, r=round_: meeting.exchange(b"%d" % r)) == [[b"%d" % round_] * 3] * 3


def test_without_a_secret_one_user_s_processes_meet_on_one_host():
    for address in ("unix:no secret " + secrets.token_hex(4), f"localhost:{random.randrange(20000, 30000)}"):
        places = [Place(rank, 2, address, timeout=20.0) for rank in range(2)]
        assert each(places, lambda meeting: meeting.exchange(b"x")) == [[b"x"] * 2] * 2


# Addresses


def test_loopback_means_a_unix_socket_and_the_network_needs_a_secret():
    for host in ("127.0.0.1", "127.0.5.1", "[::1]", "localhost"):
        family, _ = endpoint(Place(1, 2, f"{host}:5000"))
        assert family == socket.AF_UNIX
    assert endpoint(Place(1, 2, "10.1.2.3:5000", SECRET)) == (socket.AF_INET, ("10.1.2.3", 5000))
    assert endpoint(Place(1, 2, "127.0.0.1:5000", SECRET, host="mine")) == (socket.AF_INET, ("127.0.0.1", 5000))
    with pytest.raises(CollectiveError, match=r"(?s)need a secret.*export MGPU_SECRET="):
        meet(Place(1, 2, "10.1.2.3:5000"))
    assert len(abstract("x" * 1000)) < 107


def test_rank_0_listens_on_all_interfaces_when_its_own_name_means_loopback(monkeypatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 5000))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert endpoint(Place(0, 2, "node7:5000", SECRET)) == (socket.AF_INET, ("0.0.0.0", 5000))
    assert endpoint(Place(1, 2, "node7:5000", SECRET)) == (socket.AF_INET, ("127.0.1.1", 5000))


@pytest.mark.parametrize("address", ["", "host", "host:", ":5", "host:0", "host:65536", "host:x", "host:٣"])
def test_addresses_that_are_none(address):
    with pytest.raises(CollectiveError, match="expected HOST:PORT"):
        meet(Place(0, 2, address, SECRET))


@pytest.mark.parametrize("rank,size", [(-1, 2), (2, 2), (0, 0)])
def test_ranks_that_are_none(rank, size):
    with pytest.raises(CollectiveError, match="expected a rank"):
        meet(Place(rank, size, "unix:x", SECRET))


def test_an_address_in_use_says_so():
    places = unix(2)
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(endpoint(places[0])[1])
        with pytest.raises(CollectiveError, match="already in use"):
            meet(places[0])
    with pytest.raises(CollectiveError, match=r"cannot listen at 192\.0\.2\.1:5000"):
        meet(Place(0, 2, "192.0.2.1:5000", SECRET))


# Ranks that disagree


@pytest.mark.parametrize("older", [0, 2])
def test_versions_are_compared_and_both_named(older):
    places = unix(3, timeout=10.0)
    with process(places[older], prelude="from collectives import channel; channel.__version__ = '0.0.7'"):
        results = each([place for place in places if place.rank != older], lambda meeting: None)
    for result in results:
        assert type(result) is CollectiveError
        for name in ("0.0.7", "rank 0", channel.__version__, "install the same version"):
            assert name in str(result)


def test_sizes_ranks_and_secrets_that_do_not_agree():
    def failures(places):
        results = each(places, lambda meeting: None)
        assert all(type(result) is CollectiveError for result in results), results
        return [str(result) for result in results]

    places = unix(3, timeout=5.0)
    for text in failures([*places[:2], dataclasses.replace(places[2], size=4)]):
        assert "rank 2 was told of 4 ranks and rank 0 of 3" in text
    places = unix(3, timeout=5.0)
    for text in failures([places[0], places[1], places[1]]):
        assert "two processes say that they are rank 1" in text
    places = unix(2, timeout=1.0)
    hub, stranger = each([places[0], dataclasses.replace(places[1], secret=b"wrong")], lambda meeting: None)
    assert type(stranger) is CollectiveError and "MGPU_SECRET" in str(stranger)
    assert type(hub) is CollectiveTimeoutError
    assert "rank 0 arrived, rank 1 did not" in str(hub) and "1 connections were refused" in str(hub)


def test_a_secret_is_never_shown():
    assert SECRET.decode() not in repr(unix(2)[0])


# Ranks that are late, die, leave or fail


def test_the_timeout_names_who_came_and_who_did_not():
    places = unix(5, timeout=0.6)
    results = each([places[0], places[2], places[4]], lambda meeting: None)
    for result in results:
        assert type(result) is CollectiveTimeoutError
        assert "ranks 0, 2 and 4 arrived, ranks 1 and 3 did not" in str(result)
    with pytest.raises(CollectiveTimeoutError, match="rank 0, which did not arrive .Connection refused"):
        meet(unix(2, timeout=0.3)[1])


@pytest.mark.parametrize("impatient", [0, 1])
def test_whoever_s_deadline_passes_everybody_learns_who_was_missing(impatient):
    def job(meeting):
        meeting.exchange(b"")
        if meeting.rank == 2:
            time.sleep(1.0)  # late
        try:
            meeting.exchange(b"", 0.4 if meeting.rank == impatient else 20.0)
        finally:
            with pytest.raises(CollectiveError):  # and nothing works after that
                meeting.exchange(b"")

    for result in each(unix(3), job):
        assert type(result) is CollectiveTimeoutError
        assert f"rank {impatient}'s deadline passed: ranks 0 and 1 arrived, rank 2 did not" in str(result)


def test_a_rank_that_closes_while_others_count_on_it():
    for leaver in (0, 2):
        results = each(unix(3), lambda meeting, r=leaver: meeting.rank == r or meeting.exchange(b""))
        for rank, result in enumerate(results):
            if rank != leaver:
                assert type(result) is PeerLostError
                assert f"rank {leaver} has closed its communicator" in str(result)


@pytest.mark.parametrize("kind", [CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError])
def test_a_rank_that_fails_tells_the_others_why(kind):
    hosts = ["a", "a", "b", "b"]

    def job(meeting):
        if meeting.rank == 3:
            meeting.fail(kind("rank 3 has found something"))
        meeting.exchange(b"")

    for result in each(tcp(4, hosts), job):
        assert type(result) is kind and str(result) == "rank 3 has found something"


def test_different_exchanges_are_a_mismatch():
    def job(meeting):
        for fd in meeting.exchange_fd(0) if meeting.rank == 1 else [meeting.exchange(b"")]:
            os.close(fd)

    for result in each(unix(3), job):
        assert type(result) is CollectiveMismatchError
        assert "rank 1 is in an exchange of DESCRIPTORS, rank 0 in one of DATA" in str(result)


@pytest.mark.parametrize("make", [unix, tcp])
def test_a_rank_killed_while_others_meet(make, monkeypatch):
    places, there, killed = make(4), threading.Event(), []
    welcome = Door._welcome

    def note(door, introduction, connection):
        welcome(door, introduction, connection)
        if introduction.rank == 3:
            there.set()

    monkeypatch.setattr(Door, "_welcome", note)
    with process(places[3]) as victim:

        def kill():
            assert there.wait(30)  # and rank 2 never comes
            killed.append(time.monotonic())
            victim.kill()

        results = together([lambda: meet(places[0]), lambda: meet(places[1]), kill])
        for result in results[:2]:
            assert type(result) is PeerLostError and "rank 3 was lost" in str(result)
        assert time.monotonic() - killed[0] < 1.5


@pytest.mark.parametrize("make", [unix, tcp])
def test_rank_0_killed_while_others_wait_for_the_rest(make, monkeypatch):
    places, there, killed = make(4), threading.Semaphore(0), []
    welcome = rendezvous.Star.welcome

    def note(star, deadline):
        there.release()
        welcome(star, deadline)

    monkeypatch.setattr(rendezvous.Star, "welcome", note)
    with process(places[0]) as victim:

        def kill():
            for _ in range(2):
                assert there.acquire(timeout=30)  # and rank 3 never comes
            killed.append(time.monotonic())
            victim.kill()

        results = together([lambda: meet(places[1]), lambda: meet(places[2]), kill])
        for result in results[:2]:
            assert type(result) is PeerLostError and "rank 0 was lost" in str(result)
        assert time.monotonic() - killed[0] < 1.5


@pytest.mark.parametrize("make", [unix, tcp])
@pytest.mark.parametrize("doing", ["sleeps", "exchanges"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_during_an_exchange(make, doing, victim):
    places = make(3)
    alive = [rank for rank in range(3) if rank != victim]
    with process(places[victim], doing) as child:
        killed = 0.0

        def rank_of(place):
            def run():
                meeting = meet(place)
                try:
                    while True:
                        meeting.exchange(b"y")
                finally:
                    meeting.close()

            return run

        def kill():
            nonlocal killed
            assert child.stdout.readline() == b"met\n"
            time.sleep(0.1)
            killed = time.monotonic()
            child.kill()

        results = together([*(rank_of(places[rank]) for rank in alive), kill])
        assert time.monotonic() - killed < 1.5
        for result in results[:2]:
            assert type(result) is PeerLostError and f"rank {victim} was lost" in str(result), result


def test_a_dead_rank_is_seen_though_a_child_of_its_holds_the_connection():
    places = unix(2)
    fork = PROCESS.replace(
        "time.sleep(60)", "import os; os.fork() or (time.sleep(5), os._exit(0)); os.kill(os.getpid(), 9)"
    )
    argv = ["1", "2", places[1].address, "", "forks"]
    script = fork.format(secret=SECRET, prelude="")
    with subprocess.Popen([sys.executable, "-c", script, *argv], stdout=subprocess.PIPE, text=True) as child:
        meeting = meet(places[0])
        assert child.wait() == -signal.SIGKILL
        since = time.monotonic()
        assert meeting.lost() == [1]
        with pytest.raises(PeerLostError, match="rank 1 was lost: its process has ended"):
            meeting.exchange(b"")
        assert time.monotonic() - since < 1.5
        meeting.close()


def test_with_several_hosts_the_missing_are_named_with_theirs():
    def job(meeting):
        if meeting.rank != 2:
            meeting.exchange(b"", 0.3)
        time.sleep(0.6)

    results = each(tcp(3, ["east", "east", "west"]), job)
    for result in results[:2]:
        assert "ranks 0 and 1 (on east) arrived, rank 2 (on west) did not" in str(result)


def test_a_stopped_rank_is_a_timeout():
    places = unix(2)
    with process(places[1], "exchanges") as child:
        meeting = meet(places[0])
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(CollectiveTimeoutError, match="rank 0 arrived, rank 1 did not"):
            while True:
                meeting.exchange(b"", 0.5)
        meeting.close()


# Strangers


def knock(place):
    family, address = endpoint(place)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(5.0)
    connection.connect(address)
    return connection


HELLO = channel._HELLO


def crafted(rng):
    """One stranger's bytes: noise, greetings cut short or too long, lies, the right beginning without the secret."""
    hello = HELLO.pack(b"MGPU", channel.PROTOCOL, b"0.1.0", rng.choice([0, 1, 2, 2**32 - 1]), 3, rng.randbytes(32))
    kinds = [
        b"",
        rng.randbytes(rng.randrange(1, 4000)),
        hello[: rng.randrange(len(hello))],
        hello,
        hello + bytes(32),
        hello + rng.randbytes(32),
        hello + rng.randbytes(32) + b"\xff\xff\xff\xff\x01" + bytes(1000),
        b"GPUM" + hello[4:],
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * rng.randrange(1, 9),
        b"\x80\x04\x95" + rng.randbytes(60),  # a pickle
        hello * rng.randrange(2, 40),
        bytes(100_000),
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("make", [unix, tcp])
def test_strangers_neither_get_in_nor_keep_honest_ranks_out(make):
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    places = make(3)
    over = threading.Event()

    def strangers():
        held, count = [], 0
        while not over.is_set() or count < 300:
            try:
                connection = knock(places[0])
            except OSError:
                if over.is_set():
                    break
                time.sleep(0.01)
                continue
            count += 1
            with contextlib.suppress(OSError):
                connection.sendall(crafted(rng))
                if rng.random() < 0.3:
                    connection.settimeout(0.01)
                    connection.recv(200)
            if rng.random() < 0.5:
                held.append(connection)  # half-open: says no more and stays
            else:
                connection.close()
            if count == 300:
                over.set()
        for connection in held:
            connection.close()
        return count

    def hub():
        meeting = meet(places[0])
        result = meeting.exchange(b"0")
        meeting.close()
        return result

    def honest(place):
        def run():
            over.wait(30)  # the strangers were there first, and some stay
            meeting = meet(place)
            result = meeting.exchange(b"%d" % place.rank)
            meeting.close()
            return result

        return run

    results = together([strangers, hub, honest(places[1]), honest(places[2])])
    assert results[0] >= 300, f"seed {seed}"
    assert results[1:] == [[b"0", b"1", b"2"]] * 3, f"seed {seed}: {results}"


def test_silent_strangers_are_shown_out_in_time(monkeypatch):
    monkeypatch.setattr("collectives.door._HANDSHAKE", 0.2)
    places = unix(2, timeout=1.5)
    errors = together([lambda: meet(places[0]), lambda: _stay(places[0])])
    assert type(errors[0]) is CollectiveTimeoutError
    assert errors[1] < 1.0


def _stay(place):
    """Seconds until the door lets go of somebody who sends one byte and waits."""
    time.sleep(0.1)
    since = time.monotonic()
    with knock(place) as connection:
        connection.sendall(b"M")
        assert connection.recv(1) == b""
    return time.monotonic() - since


class Between(threading.Thread):
    """Somebody on the line between a rank and the hub, who hears every byte and may change some."""

    def __init__(self, place, change=lambda count, data: data):
        super().__init__(daemon=True)
        self.target, self.change = place, change
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.heard = b""

    def run(self):
        inner, _ = self.listener.accept()
        outer = None
        while outer is None:
            with contextlib.suppress(OSError):
                outer = knock(self.target)
        back = threading.Thread(target=self.pump, args=(outer, inner, lambda count, data: data), daemon=True)
        back.start()
        self.pump(inner, outer, self.change, listen=True)
        back.join()
        inner.close()
        outer.close()
        self.listener.close()

    def pump(self, source, sink, change, listen=False):
        source.settimeout(20.0)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                before = len(self.heard)
                if listen:
                    self.heard += data
                sink.sendall(change(before, data))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_what_was_heard_on_the_line_is_of_no_use_later():
    places = tcp(2)
    line = Between(places[0])
    line.start()
    spied = dataclasses.replace(places[1], address=line.address)
    assert each([places[0], spied], lambda meeting: meeting.exchange(b"x")) == [[b"x"] * 2] * 2
    line.join(10)
    places = [dataclasses.replace(place, timeout=1.0) for place in places]

    def replay():
        time.sleep(0.2)
        with knock(places[0]) as connection:
            connection.sendall(line.heard)
            connection.settimeout(5.0)
            with contextlib.suppress(OSError):
                while connection.recv(4096):
                    pass

    hub, _ = together([lambda: meet(places[0]), replay])
    assert type(hub) is CollectiveTimeoutError
    assert "rank 1 did not" in str(hub)


def test_bytes_changed_on_the_line_are_noticed():
    handshake = HELLO.size + channel._PROOF
    for _ in range(5):
        place = random.randrange(handshake, handshake + 300)

        def change(before, data, place=place):
            data = bytearray(data)
            if before <= place < before + len(data):
                data[place - before] ^= 1 << random.randrange(8)
            return bytes(data)

        places = tcp(2, timeout=3.0)
        line = Between(places[0], change)
        line.start()

        def job(meeting):
            for _ in range(10):
                assert meeting.exchange(b"x" * 40) == [b"x" * 40] * 2

        results = each([places[0], dataclasses.replace(places[1], address=line.address)], job)
        assert all(isinstance(result, CollectiveError) for result in results), results
        line.join(10)


def test_a_meeting_of_one_needs_no_address():
    meeting = meet(Place(0, 1, ""))
    assert isinstance(meeting, Meeting)
    assert meeting.exchange(b"x") == [b"x"]
    (fd,) = meeting.exchange_fd(0)
    os.close(fd)
    assert meeting.lost() == []
    meeting.close()
    meeting.close()
