"""Training steps in one process: turns, the table, and the two sides' networks, which compute the same."""

from pathlib import Path

import numpy as np
import pytest

from bench import networks
from bench.diff import read
from bench.single_process import Runner, main, report


def test_the_table() -> None:
    results = {
        "mgpu": {"version": "mgpu 1", "ns": [9e6, 10e6, 30e6], "memory": 50e6},
        "torch": {"version": "torch 2", "ns": [20e6], "memory": 100e6},
        "torch, channels last": {"version": "torch 2", "ns": [12.5e6], "memory": 200e6},
    }
    lines = list(report("resnet", results))
    assert lines[1].split()[:2] == ["mgpu", "10.00"]
    assert lines[1].endswith("time 0.80, memory 0.50")
    assert lines[2].split() == ["torch", "20.00", "(20.00", "to", "20.00)", "100"]
    assert lines[-1] == "#   mgpu 1; torch 2"


@pytest.mark.parametrize("network", networks.NETWORKS)
def test_a_batch_fits_its_network(network: str) -> None:
    inputs, labels = networks.data(network)
    assert inputs.dtype in (np.float32, np.int64)
    assert labels.shape in (inputs.shape[:1], inputs.shape[:2])


@pytest.mark.parametrize("network", networks.NETWORKS)
def test_pytorch_computes_the_same_loss_from_the_same_weights(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    inputs, labels = networks.data(network)
    monkeypatch.setattr(networks, "data", lambda name: (inputs[:4], labels[:4]))
    ours, theirs = networks.step_of_ours(network), networks.step_of_theirs(network, network == "resnet")
    for _ in range(2):
        assert ours() == pytest.approx(theirs(), rel=1e-3)


def test_two_turns_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mlp", "--alone", "--rounds", "2", "--steps", "1", "--json", f"{tmp_path}/x"]) == 0
    assert "ms a step" in capsys.readouterr().out
    content = read(tmp_path / "x")
    (result,) = content["rows"]
    assert len(content["samples"]) == 2
    assert result["memory"] > 10e6
    assert result["loss"] == pytest.approx(np.log(10), abs=0.3)


def test_a_side_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="mgpu's nothing ended with code 1"), Runner("nothing", "mgpu", 1) as runner:
        runner.hear()


def test_an_unknown_network(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lenet"])
    assert "there are mlp, resnet, lstm, transformer" in capsys.readouterr().err
