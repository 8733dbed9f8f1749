"""Log-mel features of signals whose spectrum is known, and WAV files of every kind."""

import struct
import wave

import numpy as np
import pytest

from mgpu_core.data import sound
from mgpu_core.data.sound import SoundError


def sine(frequency, seconds, rate):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [8000, 16000])
def test_a_tone_is_loudest_in_the_band_that_it_is_in(rate):
    filters = sound.mel_filters(512, rate)
    for band in range(3, sound.BANDS, 6):
        frequency = filters[band].argmax() * rate / 512
        loudest = sound.log_mel(sine(frequency, 0.3, rate), rate).argmax(axis=1)
        assert (abs(loudest - band) <= 1).all()


def test_filters_are_triangles_that_share_every_frequency_between_two():
    filters = sound.mel_filters(4096, 8000)
    peaks = filters.argmax(axis=1)
    assert (np.diff(peaks) > 0).all() and filters.min() == 0 and filters.max() <= 1
    np.testing.assert_allclose(filters[:, peaks[0] + 1 : peaks[-1]].sum(axis=0), 1, atol=0.02)


@pytest.mark.parametrize("length", [0, 1, 199, 200, 201, 279, 280, 8000])
def test_a_frame_each_hundredth_of_a_second(length):
    features = sound.log_mel(np.random.default_rng(0).uniform(-1, 1, length), 8000)
    assert features.shape == (1 + max(0, length - 200) // 80, sound.BANDS)
    assert features.dtype == np.float32 and np.isfinite(features).all()


def test_silence_is_finite_and_normalised_to_nearly_nothing():
    features = sound.log_mel(np.zeros(4000), 8000)
    assert np.isfinite(features).all() and abs(sound.normalise(features)).max() < 0.01


def test_normalised_features_do_not_know_how_loud_it_was():
    signal = np.random.default_rng(0).standard_normal(8000)
    one, other = (sound.normalise(sound.log_mel(signal * gain, 8000)) for gain in (0.1, 0.5))
    np.testing.assert_allclose(one, other, atol=1e-3)
    np.testing.assert_allclose(one.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(one.std(axis=0), 1, atol=0.01)


@pytest.mark.parametrize("frames", [0, 1, 2, 3, 7])
def test_stacking_loses_nothing(frames):
    features = np.random.default_rng(0).standard_normal((frames, 4)).astype(np.float32)
    stacked = sound.stack(features, 3)
    assert stacked.shape == (-(-frames // 3), 12)
    np.testing.assert_array_equal(stacked.reshape(-1, 4)[:frames], features)
    assert not stacked.reshape(-1, 4)[frames:].any()


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 44100, 48000])
def test_resampling_keeps_a_tone(rate):
    found = sound.resample(sine(440, 1.0, rate), rate, 8000)
    assert len(found) == 8000 and found.dtype == np.float32
    np.testing.assert_allclose(found, sine(440, 1.0, 8000), atol=1e-5)


def test_resampling_drops_what_the_lower_rate_cannot_hold():
    assert abs(sound.resample(sine(6000, 1.0, 16000), 16000, 8000)).max() < 1e-5


# Files


def write(path, samples, *, width, channels=1, rate=8000):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_pcm_of_every_width_is_read(tmp_path, width, channels):
    values = np.array([0, 0.5, -0.5, 0.25, -1.0])
    scaled = [int(value * 2 ** (8 * width - 1)) for value in values for _ in range(channels)]
    if width == 1:
        samples = bytes(value + 128 for value in scaled)
    else:
        samples = b"".join(struct.pack("<i", value)[:width] for value in scaled)
    found = sound.read_wave(write(tmp_path / "a.wav", samples, width=width, channels=channels), 8000)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, atol=2 ** -(8 * width - 2))


def test_another_rate_is_resampled(tmp_path):
    samples = (sine(440, 0.5, 44100) * 2**15).astype("<i2").tobytes()
    found = sound.read_wave(write(tmp_path / "a.wav", samples, width=2, rate=44100), 8000)
    assert len(found) == 4000
    np.testing.assert_allclose(found[100:-100], sine(440, 0.5, 8000)[100:-100], atol=1e-3)


WRONG = {
    "empty file": b"",
    "no WAV": b"<html>not found</html>",
    "cut header": b"RIFF\x24\x00\x00\x00WAVEfmt ",
    "compressed": b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00" + struct.pack("<HHIIHH", 85, 1, 8000, 8000, 1, 8),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_what_is_no_wav_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(SoundError, match=r"a\.wav is not a WAV file of plain PCM samples .*ffmpeg"):
        sound.read_wave(tmp_path / "a.wav", 8000)


def test_a_file_without_samples_is_refused(tmp_path):
    with pytest.raises(SoundError, match="holds no sound"):
        sound.read_wave(write(tmp_path / "a.wav", b"", width=2), 8000)
    with pytest.raises(FileNotFoundError):
        sound.read_wave(tmp_path / "none.wav", 8000)
