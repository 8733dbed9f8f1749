"""`mgpu tune`: what is measured, what is made of it, where it is kept, and who uses it."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crew import Crews

import collectives
from collectives import Communicator, cgroup, measured, tune
from collectives.cost import Rate, Topology, predict
from collectives.inspect import predict_main
from collectives.lowering import Memory, build
from collectives.select import choose, one_shot_bytes
from kernels import native

MIB = 1 << 20
# made up: 40 GB/s from the cache, 10 from memory, of which all ranks together get 16
SLOW_MEMORY = Topology(
    (2,),
    cores=2,
    latency=1e-7,
    overhead=1e-7,
    own=Rate(((MIB, 40e9), (16 * MIB, 10e9))),
    peer=Rate(((MIB, 40e9), (16 * MIB, 10e9))),
    together=Rate(((MIB, 80e9), (16 * MIB, 16e9))),
    arithmetic=float("inf"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, with the kernels that are compiled already."""
    (tmp_path / "kernels").symlink_to(native.cache_folder().parent)
    monkeypatch.setenv("MGPU_CACHE", str(tmp_path))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_model_gives_back_what_it_was_made_of(size: int) -> None:
    """On the calls that are measured, of sizes in the cache, at its edge and far beyond."""
    stored = {MIB: 1e-12, 4 * MIB: 2e-11, 16 * MIB: 9e-11}
    access = {MIB: 2e-11, 4 * MIB: 5e-11, 16 * MIB: 1e-10}
    alone = {n: n * ((size + 2) * seconds - 2e-11) for n, seconds in access.items()}
    together = {n: n / size * ((size + 2) * 1.5 * seconds - 3e-11) for n, seconds in access.items()}
    again = {n: n * (1.5 * access[n] + stored[n]) for n in access}
    topology = tune.fit(size, 1e-6, 1e-7, alone, together, again)
    for n in access:
        reduced = predict(build("reduce", "one_shot", size, pipelined=False), n, topology)
        scattered = predict(build("reduce_scatter", "direct", size, pipelined=False), n, topology)
        assert reduced == pytest.approx(alone[n] + 1e-7 + 2e-6, rel=0.02)
        assert scattered == pytest.approx(together[n] + 1e-7 + 2e-6, rel=0.02)
        in_place = predict(build("all_reduce", "two_shot", size, pipelined=False), n, topology, in_place=True)
        assert in_place == pytest.approx(again[n] + 1e-7 + 2e-6, rel=0.25), "at other footprints, so loads are between"


def _measure(comm: Communicator) -> tune.Rounds:
    return tune.measure(comm, footprints=[96 << 10, MIB])


def test_all_ranks_measure_the_same(crew: Crews) -> None:
    first, other = crew(_measure, 2)
    for one, two in ((first.signal, other.signal), (first.move, other.move)):
        assert one.shape == (tune.ROUNDS,)
        np.testing.assert_array_equal(one, two)
    three, two = [32 << 10, MIB // 12 * 4 // 8 * 8], [48 << 10, MIB // 2]  # arrays that the footprint is of
    for times, others, sizes in (
        (first.alone, other.alone, three),
        (first.together, other.together, three),
        (first.again, other.again, two),
    ):
        assert list(times) == list(others) == sizes
        for nbytes in times:
            np.testing.assert_array_equal(times[nbytes], others[nbytes])
    assert tune.constants(first) == tune.constants(other)


def _rounds(**disturbed: np.ndarray) -> tune.Rounds:
    """Of two ranks on a quiet machine, each round a little different; `disturbed` replaces what it names."""
    little = np.random.default_rng(0).permutation(np.linspace(0.9, 1.1, tune.ROUNDS))
    times = {
        "signal": 1e-7 * little,
        "move": 5e-8 * little,
        "small": 2e-5 * little,
        "large": 2e-3 * little,
        **disturbed,
    }
    alone = {MIB: times["small"], 16 * MIB: times["large"]}
    halves = {n: array / 2 for n, array in alone.items()}
    return tune.Rounds(2, times["signal"], times["move"], alone, halves, halves)


def test_constants_are_medians_of_what_can_be() -> None:
    topology, left_out, doubts = tune.constants(_rounds())
    assert (topology.latency, topology.overhead) == pytest.approx((1e-7, 5e-8)) and (left_out, doubts) == (0, [])
    some = np.repeat([-3e-6, 1e-7, 1e-3], [tune.ROUNDS // 4, tune.ROUNDS - 2 * (tune.ROUNDS // 4), tune.ROUNDS // 4])
    noisy, left_out, _ = tune.constants(_rounds(signal=some))
    assert noisy.latency == 1e-7 and left_out == tune.ROUNDS // 4


def test_rounds_with_the_cores_far_from_each_other_do_not_count() -> None:
    """As where they are near in a third of the rounds only."""
    far = np.arange(tune.ROUNDS) % 3 > 0
    quiet = {"signal": 1e-7, "move": 5e-8, "small": 2e-5, "large": 2e-3}
    rounds = _rounds(**{what: seconds * np.where(far, 5.0, 1.0) for what, seconds in quiet.items()})
    assert tune.constants(rounds) == tune.constants(_rounds(**{w: np.full(tune.ROUNDS, s) for w, s in quiet.items()}))


@pytest.mark.parametrize(
    ("what", "factor", "told"),
    [(what, -1e-3, "seemed to take no time") for what in ("signal", "move", "small", "large")]
    + [(what, 50, "in one round and") for what in ("move", "small", "large")],
)
def test_there_is_a_reason_not_to_keep_what_cannot_be_or_varies(what: str, factor: float, told: str) -> None:
    half = tune.ROUNDS // 2
    quiet: np.ndarray = {"signal": 1e-7, "move": 5e-8, "small": 2e-5, "large": 2e-3}[what] * np.ones(tune.ROUNDS)
    names = {
        "signal": ("a signal",),
        "move": ("a Move",),
        "small": ("3,145,728 bytes", "2,097,152 bytes, all together in place"),
        "large": ("50,331,648 bytes", "33,554,432 bytes, all together in place"),
    }
    disturbed = quiet * np.repeat([factor, 1], [tune.ROUNDS - half, half])
    _, _, doubts = tune.constants(_rounds(**{what: disturbed}))
    assert doubts and all(doubt.startswith(names[what]) and told in doubt for doubt in doubts)


def test_what_is_measured_is_kept_for_as_many_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    monkeypatch.setattr(tune, "spawn", lambda fn, ranks, backend: [_rounds()] * ranks)
    assert tune.main(["-n", "2"]) == 0
    out = capsys.readouterr().out
    assert "a signal takes 0.10 us" in out and str(measured.path(2)) in out
    assert measured.kept(2) == tune.constants(_rounds())[0] and measured.kept(3) is None
    assert predict_main(["all_reduce", "two_shot", "-n", "2", "-b", "8"]) == 0
    assert "2 ranks on this machine" in capsys.readouterr().out
    assert tune.main([]) == 0  # one for each processor that there is for them
    assert capsys.readouterr().out.startswith("measuring with 3 ranks on 3 processors")
    for damaged in ("{", '{"hosts": [2], "own": null}'):
        measured.path(2).write_text(damaged)
        assert measured.kept(2) is None  # as if never measured
    measured.path(2).write_text('{"hosts": [2], "again": null}')
    assert measured.kept(2) == Topology((2,))


@pytest.mark.parametrize(("ranks", "told"), [("1", "nobody to talk to"), ("13", "-n is 12 or less here")])
def test_numbers_of_ranks_that_say_nothing_are_refused_at_once(
    ranks: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    with pytest.raises(SystemExit):
        tune.main(["-n", ranks])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("signal", [-1e-8, -1e-6])
def test_what_was_measured_beside_other_programs_is_not_kept(
    signal: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = _rounds(signal=np.full(tune.ROUNDS, signal))
    monkeypatch.setattr(tune, "spawn", lambda fn, ranks, backend: [busy] * ranks)
    assert tune.main(["-n", "2"]) == 1
    told = capsys.readouterr().err
    assert (
        "a signal seemed to take no time, in 15 of 15 rounds" in told and "try again when the machine is quiet" in told
    )
    assert measured.kept(2) is None


def test_what_is_kept_is_for_the_processors_that_ranks_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    measured.keep(SLOW_MEMORY)
    assert measured.kept(2) == measured.kept(2, cores=4) == SLOW_MEMORY
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 1.5)  # a container's
    assert measured.kept(2) is None
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})  # taskset's
    assert measured.kept(2) is None


def test_choices_follow_the_constants() -> None:
    slow_signals = replace(SLOW_MEMORY, latency=1e-3)
    memories: tuple[Memory, ...] = ("symmetric", "staged")
    for memory in memories:
        for size in (2, 3, 8):  # families, too
            few = one_shot_bytes("all_reduce", size, memory, SLOW_MEMORY)
            assert choose("all_reduce", size, few, memory, tuned=SLOW_MEMORY) == "one_shot"
            assert choose("all_reduce", size, few + 1, memory, tuned=SLOW_MEMORY) == "two_shot"
            assert few < one_shot_bytes("all_reduce", size, memory, slow_signals) <= 256 << 10  # one slice
        assert choose("all_gather", 2, MIB, memory, tuned=SLOW_MEMORY) == "direct"
        assert choose("all_reduce", 2, 4096, memory) == "one_shot"  # nobody has measured
        assert choose("all_reduce", 2, 4097, memory) == "two_shot"


def test_one_step_that_is_always_faster_is_chosen_as_far_as_was_measured() -> None:
    slow_signals = replace(SLOW_MEMORY, latency=1e9)
    memories: tuple[Memory, ...] = ("symmetric", "staged")
    for collective in ("all_reduce", "reduce"):
        for memory in memories:
            for size in (1, 2, 3):
                assert 8 <= one_shot_bytes(collective, size, memory, slow_signals) <= 16 * MIB


def _tuned(comm: Communicator) -> tuple[Topology | None, float]:
    x = np.full(1000, comm.rank + 1.0, np.float32)
    with comm.split(0) as family:  # type: ignore[union-attr]
        family.all_reduce(x, out=x)
    return comm._backend.host.tuned, float(x[-1])  # type: ignore[attr-defined]


def test_rank_0_s_constants_are_everybody_s() -> None:
    measured.keep(SLOW_MEMORY)
    assert collectives.spawn(_tuned, 2) == [(SLOW_MEMORY, 3.0)] * 2


def _bound(comm: Communicator, masks: list[list[int]], address: str) -> tuple[bool, float]:
    """Of ranks that are bound to these processors: whether they share some, and the latency by which they choose."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, masks[comm.rank])
    try:
        with collectives.init("shm", rank=comm.rank, size=comm.size, address=address) as bound:
            host = bound._backend.host  # type: ignore[attr-defined]
            return host.crowded, host.tuned.latency
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_choose_by_what_was_measured_on_as_many_processors(crew: Crews) -> None:
    first, second, *_ = [*sorted(os.sched_getaffinity(0)), None]
    if second is None:
        pytest.skip("needs two processors")
    for cores, latency in ((1, 1e-6), (2, 2e-6)):
        file = measured.path(2, cores)
        file.parent.mkdir(exist_ok=True)
        replace(SLOW_MEMORY, latency=latency).save(file)
    for masks, crowded, latency in (([[first]] * 2, True, 1e-6), ([[first], [second]], False, 2e-6)):
        assert crew(_bound, 2, (masks, f"unix:{secrets.token_hex(16)}")) == [(crowded, latency)] * 2
