"""Sound as networks read it: log-mel features, and WAV files at any rate.

Log-mel features: short frames of the signal, the power of each at every frequency, summed in bands as wide as the ear's
(the mel scale: Stevens, Volkmann and Newman 1937; O'Shaughnessy's formula), and the logarithm of that.
"""

from __future__ import annotations

import functools
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

WINDOW, HOP = 0.025, 0.010  # seconds
BANDS = 40
LOWEST = 60.0  # Hz; the highest is half the rate


class SoundError(ValueError):
    """A recording that cannot be used; the message names the file and says what it should be."""


def log_mel(signal: NDArray[Any], rate: int) -> NDArray[np.float32]:
    """Features (frames, BANDS) of a signal (samples,) in -1 to 1, one frame each HOP seconds; at least one frame."""
    window, hop = round(WINDOW * rate), round(HOP * rate)
    if len(signal) < window:
        signal = np.pad(signal, (0, window - len(signal)))
    frames = sliding_window_view(signal, window)[::hop] * np.hanning(window + 1)[:-1]
    points = 1 << (window - 1).bit_length()
    power = np.abs(np.fft.rfft(frames, points)) ** 2
    return np.log(power @ mel_filters(points, rate).T + 1e-6).astype(np.float32)


@functools.cache
def mel_filters(points: int, rate: int, bands: int = BANDS) -> NDArray[np.float64]:
    """Weights (bands, points // 2 + 1) of an FFT's frequencies: triangles that are equally wide on the mel scale."""
    edges = _hertz(np.linspace(_mel(LOWEST), _mel(rate / 2), bands + 2))
    frequencies = np.arange(points // 2 + 1) * rate / points
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rising, falling))


def _mel(hertz: Any) -> Any:
    return 2595 * np.log10(1 + hertz / 700)


def _hertz(mel: Any) -> Any:
    return 700 * (10 ** (mel / 2595) - 1)


def stack(features: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Each `count` successive frames as one: (frames, bands) to (ceil(frames / count), count bands), 0 at the end."""
    padded = np.pad(features, ((0, -len(features) % count), (0, 0)))
    return padded.reshape(-1, count * features.shape[1])


def normalise(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Features of mean 0 and deviation 1 in each band over the recording: what microphone and loudness leave alike."""
    return (features - features.mean(axis=0)) / (features.std(axis=0) + np.float32(1e-3))


def read_wave(path: str | Path, rate: int) -> NDArray[np.float32]:
    """A WAV file's signal (samples,) in -1 to 1, its channels averaged, at `rate` samples a second whatever its own.

    Raises:
        FileNotFoundError: if there is no such file.
        SoundError: if it is not a WAV file of PCM samples, or holds none.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, own_rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise SoundError(
            f"{path} is not a WAV file of plain PCM samples ({error or 'it ends too soon'}); "
            "convert it first, for instance with ffmpeg -i IN -c:a pcm_s16le OUT.wav"
        ) from error
    content = content[: len(content) - len(content) % (channels * width)]
    if not content or own_rate <= 0:
        raise SoundError(f"{path} holds no sound: {len(content)} bytes of samples at {own_rate} a second")
    return resample(_pcm(content, width).reshape(-1, channels).mean(axis=1), own_rate, rate)


def _pcm(content: bytes, width: int) -> NDArray[np.float32]:
    """Samples of `width` bytes, little-endian and signed but for single bytes, as -1 to 1."""
    if width == 1:
        return (np.frombuffer(content, np.uint8) / 128 - 1).astype(np.float32)
    parts = np.frombuffer(content, np.uint8).reshape(-1, width)
    wide = np.zeros((len(parts), 4), np.uint8)
    wide[:, 4 - width :] = parts[:, :4]
    return (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)


def resample(signal: NDArray[Any], rate: int, new_rate: int) -> NDArray[np.float32]:
    """A signal (samples,) at another rate: its spectrum, cut off at the lower rate's half or filled up with zeros."""
    if rate == new_rate:
        return signal.astype(np.float32)
    count = max(1, round(len(signal) * new_rate / rate))
    spectrum = np.fft.rfft(signal)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(signal))).astype(np.float32)
