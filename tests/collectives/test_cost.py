"""The model of time: what a replay knows, and the formulas that agree with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collectives.cost import FORMS, Rate, Topology, closed_form, predict, replay, slices_of
from collectives.lowering import build
from collectives.program import Move

# round figures: 1 us a signal, 1 GB/s everywhere, everything else free
PLAIN = Topology(
    (4,),
    latency=1e-6,
    overhead=0.0,
    own=Rate(((1, 1e9),)),
    peer=Rate(((1, 1e9),)),
    arithmetic=float("inf"),
    network=1e9,
)
MIB = 1 << 20


def test_a_two_shot_takes_its_bytes_and_two_latencies() -> None:
    """Each of 4 ranks moves 2 x 4 quarters; one latency to enter, one to leave."""
    assert predict(build("all_reduce", "two_shot", 4), MIB, PLAIN) == pytest.approx(2 * MIB / 1e9 + 2e-6)


def test_a_ring_takes_its_steps() -> None:
    quarter = MIB / 4 / 1e9
    assert predict(build("all_reduce", "ring", 4), MIB, PLAIN) == pytest.approx(1e-6 + 3 * (5 * quarter + 2e-6))


def test_arithmetic_and_overhead_and_crowding_cost_time() -> None:
    program = build("all_reduce", "two_shot", 4)
    base = predict(program, MIB, PLAIN)
    assert predict(program, MIB, replace(PLAIN, overhead=5e-6)) == pytest.approx(base + 5e-6)
    assert predict(program, MIB, replace(PLAIN, arithmetic=1e9)) == pytest.approx(base + 3 * MIB / 4 / 1e9)
    assert predict(program, MIB, replace(PLAIN, cores=2)) == pytest.approx(2 * base)


def test_the_bandwidth_depends_on_the_footprint() -> None:
    rate = Rate(((1e6, 100e9), (1e8, 1e9)))
    assert rate.at(1) == pytest.approx(100e9) and rate.at(1e9) == pytest.approx(1e9)
    assert rate.at(1e7) == pytest.approx(10e9)  # half-way on logarithmic axes


def test_what_is_not_in_the_cache_is_loaded_before_it_is_stored() -> None:
    """An all-gather loads half of an array and stores two halves; out of the cache each of these is loaded first."""
    rate = Rate(((8e6, 4e9), (64e6, 1e9)))
    topology = replace(PLAIN, hosts=(2,), latency=0.0, own=rate, peer=rate)
    program = build("all_gather", "direct", 2)
    assert predict(program, MIB, topology) == pytest.approx(1.5 * MIB / 4e9)
    assert predict(program, 64 * MIB, topology) == pytest.approx(64 * MIB * (0.5 + 2 - 0.25) / 1e9)
    assert predict(program, 64 * MIB, topology, in_place=True) == pytest.approx(64 * MIB * (0.5 + 1 - 0.125) / 1e9)


def test_all_ranks_share_their_host_s_memory() -> None:
    """A two-shot's 2pN bytes through a memory that is slower than its ranks together."""
    topology = replace(PLAIN, latency=0.0, together=Rate(((1, 2e9),)))
    assert predict(build("all_reduce", "two_shot", 4), MIB, topology) == pytest.approx(8 * MIB / 2e9)
    assert predict(build("reduce", "one_shot", 4), MIB, topology) == pytest.approx(5 * MIB / 1e9)  # one rank alone


def test_scratch_stays_in_the_cache() -> None:
    """Through 1 MiB of it, an array is loaded and stored at the memory's rate, and scratch at the cache's."""
    fast = Rate(((16e6, 1e12), (64e6, 1e9)))
    topology = replace(PLAIN, hosts=(2,), latency=0.0, own=fast, peer=fast)
    program = build("send_recv", "direct", 2, memory="staged", slots=4)
    assert predict(program, 64 * MIB, topology, slot=MIB // 4) == pytest.approx(2 * 64 * MIB / 1e9, rel=0.05)


def test_pipelining_hides_all_but_the_first_slice() -> None:
    """A chain of 8 in staged memory: each slice is stored and loaded once a rank, all ranks at once."""
    topology = replace(PLAIN, hosts=(8,), latency=0.0)
    program = build("broadcast", "chain", 8, memory="staged")
    assert slices_of(program, 64 * MIB, slot=MIB) == 64
    seconds = predict(program, 64 * MIB, topology, slot=MIB)
    hop = 3 * MIB / 1e9  # load from the peer, store to scratch and to the output
    assert 64 * hop < seconds < (64 + 8) * hop
    unsliced = predict(build("broadcast", "chain", 8, memory="staged", pipelined=False), MIB, topology, slot=MIB)
    assert unsliced == pytest.approx(2 * MIB / 1e9 + 6 * hop + 2 * MIB / 1e9)


def test_many_slices_are_extrapolated() -> None:
    program = build("all_reduce", "two_shot", 4, memory="staged")
    some, many = (predict(program, n * 4 * MIB, PLAIN) for n in (4, 400))
    assert many == pytest.approx(100 * some, rel=0.02)


def test_hosts_share_their_network() -> None:
    """Two hosts of 4: each of their four ranks fetches the four others' quarters of 1 MiB through one network."""
    topology = replace(PLAIN, hosts=(4, 4), network=1e8, network_latency=0.0)
    seconds = predict(build("reduce_scatter", "direct", 8), 8 * MIB, topology)
    assert seconds == pytest.approx(16 * MIB / 1e8, rel=0.01)


def test_hierarchies_pay_where_networks_are_slow() -> None:
    topology = Topology((8, 8), network=1e9)
    times = {
        name: predict(build("all_reduce", name, 16), 16 * MIB, topology)
        for name in ("two_shot", "hierarchical", "ring")
    }
    assert min(times, key=lambda name: times[name]) == "hierarchical"


def test_signals_wake_their_waiters() -> None:
    program = build("broadcast", "chain", 3)
    starts: dict[int, float] = {}

    def move(rank: int, step: int, slice_: int, start: float) -> float:
        assert isinstance(program.bodies[rank][step], Move)
        starts[rank] = start
        return start + 10.0

    assert replay(program, 1, move, lambda from_, to: 1.0) == [23.0]
    assert starts == {1: 1.0, 2: 12.0}  # enter; then what rank 1 has done, and its signal


@pytest.mark.parametrize(("collective", "algorithm"), FORMS)
def test_formulas_agree_with_the_replay(collective: str, algorithm: str) -> None:
    rough = {"hierarchical": 0.3, "halving_doubling": 0.2}
    for ranks in (2, 4, 8, 16)[algorithm in rough :]:
        if algorithm == "hierarchical":
            topologies = [Topology((ranks // 2, ranks // 2)), Topology((2,) * (ranks // 2))]
        else:
            topologies = [Topology((ranks,)), Topology((1,) * ranks), Topology((ranks,), cores=2)]
        for topology in topologies:
            options: dict[str, Any] = {"groups": len(topology.hosts)} if algorithm == "hierarchical" else {}
            program = build(collective, algorithm, ranks, pipelined=algorithm != "one_shot", **options)
            for nbytes in (MIB, 64 * MIB):
                formula = closed_form(collective, algorithm, nbytes, topology)
                played = predict(program, nbytes, topology, slot=1 << 30)
                assert formula == pytest.approx(played, rel=rough.get(algorithm, 0.05))


def test_formulas_go_far() -> None:
    assert closed_form("all_reduce", "ring", MIB, Topology((1,) * 16384)) > 2 * 16383 * 5e-6
    assert closed_form("all_reduce", "hierarchical", MIB, Topology((64,) * 256)) < 0.01


def test_what_has_no_answer_is_said() -> None:
    with pytest.raises(ValueError, match="the topology has 4 ranks, the program 3"):
        predict(build("all_reduce", "ring", 3), 8, PLAIN)
    with pytest.raises(ValueError, match="take 16 slices"):
        predict(build("broadcast", "chain", 4, memory="staged", pipelined=False), 16 * MIB, PLAIN, slot=MIB)
    with pytest.raises(ValueError, match="no closed form for gather by tree; there is for all_reduce ring"):
        closed_form("gather", "tree", 8, PLAIN)
    with pytest.raises(ValueError, match=r"does not hold for ranks on hosts like these: \(2, 3\)"):
        closed_form("all_reduce", "ring", 8, Topology((2, 3)))


def test_topologies_are_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps({"hosts": [2, 2], "own": 1e10, "peer": [[1e6, 1e11], [1e8, 1e10]]}))
    topology = Topology.load(path)
    assert topology.hosts == (2, 2) and topology.size == 4 and topology.host_of() == [0, 0, 1, 1]
    assert topology.own.at(123) == pytest.approx(1e10) and topology.peer.at(1e6) == pytest.approx(1e11)
    topology.save(tmp_path / "again.json")
    assert Topology.load(tmp_path / "again.json") == topology
    path.write_text('{"hosts": [2], "speed": 3}')
    with pytest.raises(ValueError, match=r"topology.json: a topology does not know speed; it has hosts, cores"):
        Topology.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="needs hosts"):
        Topology.load(path)
