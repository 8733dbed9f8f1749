"""The speech recipe, end to end, on tones in place of voices; and `mgpu transcribe`, which reads with its network."""

import wave

import numpy as np
import pytest

from mgpu_core import checkpoint, cli, data, metrics, random
from mgpu_core.data import DatasetError, Recordings
from mgpu_core.data.recordings import RATE
from mgpu_core.recipes import speech, utterances

TAKES = 8


def tone(digit, length):
    return (8000 * np.sin(2 * np.pi * (300 + 350 * digit) * np.arange(length) / RATE)).astype(np.int16)


def tones():
    """Two speakers; a digit is a tone of 0.1 to 0.2 s."""
    rng = np.random.default_rng(0)
    rows = [(d, s, t) for d in range(10) for s in ("ada", "bob") for t in range(TAKES)]
    digits, speakers, takes = zip(*rows)
    waves = tuple(tone(digit, rng.integers(800, 1600)) for digit in digits)
    return Recordings("here", waves, np.array(digits), np.array(speakers), np.array(takes))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(data, "spoken_digits", lambda *_, **__: tones())
    monkeypatch.setattr(speech, "TEST_UTTERANCES", 10)


def run(out, *options):
    small = ["-n", "1", "--batch", "16", "--epochs", "2", "--utterances", "48", "--size", "12", "--layers", "1"]
    return speech.main([*small, "--out", str(out), *options])


def saved(out):
    return checkpoint.load(out / "checkpoint.safetensors")


def wave_file(path, signal, rate=RATE):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(signal.astype("<i2").tobytes())
    return str(path)


def test_it_trains_resumes_exactly_leaves_files_and_transcribes(tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole) == 0
    said = capsys.readouterr().out
    assert "digit error rate" in said and "with beam search" in said and "was read as" in said
    for name in ("curves.png", "utterance.png", "confusion.png", "metrics.jsonl", "checkpoint.safetensors"):
        assert str(whole / name) in said and (whole / name).stat().st_size > 500
    assert {"digit_error_rate", "test_loss"} <= metrics.read(whole / "metrics.jsonl")[-1].keys()

    monkeypatch.setattr(speech, "show", lambda *_: None)  # pictures take longer than training
    assert run(parts, "--steps", "2") == run(parts, "--resume") == 0
    for name, array in saved(whole)[0].items():
        np.testing.assert_array_equal(array, saved(parts)[0][name], err_msg=name)
    capsys.readouterr()

    files = [wave_file(tmp_path / f"{rate}.wav", tone(3, 4000), rate) for rate in (8000, 11025)]
    network = ["--checkpoint", str(whole / "checkpoint.safetensors")]
    for beam in ("1", "4"):
        assert cli.main(["transcribe", *files, *network, "--beam", beam]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[0] for line in lines] == files


@pytest.mark.slow
def test_tones_are_learned(tmp_path, capsys):
    assert run(tmp_path, "--epochs", "40", "--utterances", "320", "--size", "32") == 0
    assert metrics.read(tmp_path / "metrics.jsonl")[-1]["digit_error_rate"] < 0.25
    signal = np.concatenate([part for digit in (4, 1, 7) for part in (tone(digit, 1200), np.zeros(1500))])
    file = wave_file(tmp_path / "417.wav", signal + 10 * np.random.default_rng(0).standard_normal(len(signal)))
    capsys.readouterr()
    assert cli.main(["transcribe", file, "--checkpoint", str(tmp_path / "checkpoint.safetensors")]) == 0
    assert capsys.readouterr().out == "4 1 7\n"


def test_each_speaker_is_held_out_in_turn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speech, "show", lambda *_: None)
    assert run(tmp_path, "--hold-out", "each", "--epochs", "1") == 0
    said = capsys.readouterr().out
    table = said[said.index("not heard before") :]
    assert "ada" in table and "bob" in table
    assert saved(tmp_path / "bob")[1]["settings"]["hold_out"] == "bob"
    assert run(tmp_path, "--hold-out", "each", "--epochs", "1", "--resume") == 0  # nothing is left to do
    again = capsys.readouterr().out
    assert again[again.index("not heard before") :] == table


def test_a_speaker_whom_nobody_knows_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="nobody is called eve; the speakers are ada, bob"):
        run(tmp_path, "--hold-out", "eve")


def test_transcribe_says_what_is_missing_or_wrong(tmp_path, capsys):
    absent = tmp_path / "none.safetensors"
    file = wave_file(tmp_path / "a.wav", tone(0, 800))
    other = tmp_path / "other.safetensors"
    checkpoint.save(other, {"model.weight": np.zeros(3)}, {"settings": {"batch": 3}})
    for arguments, message in [
        ([file, "--checkpoint", str(absent)], "mgpu train speech"),
        ([file, "--checkpoint", str(other)], "not a checkpoint of `mgpu train speech`"),
    ]:
        assert cli.main(["transcribe", *arguments]) == 1
        assert message in capsys.readouterr().err


# Utterances


def test_test_and_training_recordings_are_apart():
    recordings = tones()
    train, test = utterances.split(recordings, None)
    assert sorted([*train, *test]) == list(range(len(recordings.waves)))
    assert recordings.takes[test].max() == 4 and recordings.takes[train].min() == 5
    train, test = utterances.split(recordings, "ada")
    assert set(recordings.speakers[train]) == {"bob"} and set(recordings.speakers[test]) == {"ada"}
    assert len(train) == len(test) == 10 * TAKES


def test_an_utterance_is_one_speakers_and_ends_where_its_digits_do():
    recordings = tones()
    made = utterances.test_utterances(recordings, np.arange(len(recordings.waves)), 30)
    assert len(made) >= 30 and {len(utterance.digits) for utterance in made} == {3, 4, 5, 6}
    assert {utterance.speaker for utterance in made} == {"ada", "bob"}
    for utterance in made:
        assert utterance.signal.dtype == np.float32 and np.isfinite(utterance.signal).all()
        steps = utterances.features(utterance.signal)
        assert len(steps) >= 2 * len(utterance.digits)  # CTC needs a blank between equal digits
    again = utterances.test_utterances(recordings, np.arange(len(recordings.waves)), 30)
    np.testing.assert_array_equal(made[-1].signal, again[-1].signal)


def test_a_training_utterance_does_not_depend_on_the_split():
    make = utterances.TrainingUtterances(tones(), np.arange(160))

    def made(samples, step=5):
        with random.batch(seed=2, step=step, samples=samples):
            return make((np.arange(len(samples)),))

    steps, lengths, digits, counts = made(range(8))
    assert steps.shape[0] == digits.shape[0] == 8 and steps.dtype == np.float32
    assert lengths.max() == steps.shape[1] and counts.max() == digits.shape[1]
    for i in range(8):
        one = made(range(i, i + 1))
        np.testing.assert_array_equal(one[0][0], steps[i, : lengths[i]])
        np.testing.assert_array_equal(one[2][0], digits[i, : counts[i]])
        assert not steps[i, lengths[i] :].any()
    assert made(range(8), step=6)[0].shape != steps.shape or (made(range(8), step=6)[0] != steps).any()


def test_no_utterances_are_a_batch_too():
    make = utterances.TrainingUtterances(tones(), np.arange(160))
    with random.batch(seed=0, step=0, samples=range(0)):
        arrays = make((np.arange(0),))
    assert [len(array) for array in arrays] == [0, 0, 0, 0]
    rng = np.random.default_rng(0)
    total = speech.loss(speech.Recogniser(4, 2, rng=rng), arrays)
    assert total.item() == 0
    total.backward()
