"""A training step, and the share of its communication that hides behind backward."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.train_step import KINDS, as_torch, data, hidden_share, main, measure, milliseconds, report
from mgpu_core import Tensor, nn


@pytest.mark.parametrize(
    ("train", "share"), [(100.0, 1.0), (101.0, 0.9), (105.0, 0.5), (110.0, 0.0), (130.0, 0.0), (98.0, 1.0)]
)
def test_communication_is_hidden_as_far_as_it_does_not_lengthen_the_step(train: float, share: float) -> None:
    assert hidden_share({"train": train, "compute": 100.0, "communicate": 10.0}) == pytest.approx(share)


@pytest.mark.parametrize("batch", [1, 7, 128])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_one_batch(batch: int, ranks: int) -> None:
    parts = [data(batch, rank, ranks) for rank in range(ranks)]
    whole = data(batch, 0, 1)
    for part, all_of_it in zip(zip(*parts, strict=True), whole, strict=True):
        assert np.array_equal(np.concatenate(part), all_of_it)


class FakeCrew:
    """Two ranks, of which the second takes as long as its kind says, in ms."""

    def __init__(self, ms: dict[str, int], loss: float) -> None:
        self.track, self._ms, self._loss = self, ms, loss

    def take(self, count: int) -> int:
        return 1

    def ask(self, request: dict) -> list[dict]:
        what = request["with"]
        slow = [self._ms[what["kind"]] * 1_000_000] * what["steps"]
        return [{"ns": [1] * what["steps"], "loss": 0.0}, {"ns": slow, "loss": self._loss}]


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_loss_is_the_mean() -> None:
    ms = {"train": 12, "compute": 10, "communicate": 4}
    crews = {"mgpu": FakeCrew(ms, 2.0), "ddp": FakeCrew({kind: 2 * t for kind, t in ms.items()}, 2.0)}
    samples, losses = measure(crews, rounds=3, steps=2)  # type: ignore[arg-type]
    assert len(samples) == 3 * 2 * len(KINDS) and {sample["round"] for sample in samples} == {0, 1, 2}
    medians = milliseconds(samples)
    assert medians == {"mgpu": ms, "ddp": {kind: 2 * t for kind, t in ms.items()}}
    assert losses == {"mgpu": 1.0, "ddp": 1.0}
    lines = list(report(medians, {"mgpu": "mgpu 1"}, batch=120))
    assert lines[2].split() == ["mgpu", "12.00", "10.00", "4.000", "50%", "10000", "1.00x"]
    assert lines[3].split()[-1] == "2.00x"


def test_pytorch_computes_what_our_layers_do() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng()
    ours = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, rng=rng),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, (3, 5), stride=2, groups=2, bias=False, rng=rng),
        nn.Flatten(),
        nn.Linear(6 * 6 * 5, 10, rng=rng),
    )
    images = rng.standard_normal((3, 1, 28, 28), dtype=np.float32)
    theirs = as_torch(ours)(torch.from_numpy(images)).detach().numpy()
    assert np.allclose(ours(Tensor(images)).data, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="GELU"):
        as_torch(nn.GELU())


def test_two_ranks_take_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "2", "--batch", "8", "--steps", "1", "--rounds", "1", "--alone", "--json", f"{tmp_path}/x"]) == 0
    assert "hidden" in capsys.readouterr().out
    content = json.loads((tmp_path / "x").read_text())
    assert {row["case"]["kind"] for row in content["rows"]} == set(KINDS) and len(content["samples"]) == 3
    assert np.isfinite(content["losses"]["mgpu"])
