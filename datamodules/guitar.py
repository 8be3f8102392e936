"""Sequences of guitar chords as pitch-class profiles: read from WAV files, or synthesized."""

from __future__ import annotations

import io
import json
import math
import re
import struct
import wave
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch.utilities import rank_zero_info
from scipy.signal import resample_poly
from torch import Tensor

from datamodules.base import PARTS, Part, SequenceDataModule, as_dataset, as_table
from datamodules.checks import require_positive
from datamodules.paths import cache_name, find_files
from lightning_hmm.columns import feature_columns
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

CACHE_VERSION = 2  # Increase it whenever the same files and options are read differently.
PITCHES = ["C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B"]
A4, A4_NOTE = 440.0, 69  # Frequency in Hz, and MIDI note, where C is a multiple of 12.
SILENCE = 1e-8  # A frame is silent below this energy, relative to the loudest frame of its recording.
FULL_SCALE = {1: 2**7, 2: 2**15, 3: 2**23, 4: 2**31}  # Largest amplitude by bytes per sample.

# Chords in the first position, as MIDI notes from the lowest string to the highest.
GRIPS = {
    "A": (45, 52, 57, 61, 64),
    "Am": (45, 52, 57, 60, 64),
    "Bm": (47, 54, 59, 62, 66),
    "C": (48, 52, 55, 60, 64),
    "D": (50, 57, 62, 66),
    "Dm": (50, 57, 62, 65),
    "E": (40, 47, 52, 56, 59, 64),
    "Em": (40, 47, 52, 55, 59, 64),
    "F": (41, 48, 53, 57, 60, 65),
    "G": (43, 47, 50, 55, 59, 67),
}
DURATION = (1.0, 3.0)  # Range of the duration of a synthetic recording in seconds.
STRUM = 0.03  # Maximum seconds from one string to the next.
ROOMS = (0.001, 0.02)  # Noise in an anechoic chamber and in an ordinary room, relative to the level of a string.


class GuitarDataModule(SequenceDataModule):
    """Sequences of guitar chords, where each step is the pitch-class profile of a short window.

    A profile consists of twelve numbers, C to B, that sum to 1 unless `compression` is given. The spectrum of a Hann
    window is folded into one octave: the energy of each frequency is assigned to the nearest tone (Fujishima, 1999).
    Each sequence is a concatenation of random recordings, which play for random durations. The true states are the
    chords. Recordings are split into parts before sequences are formed, so the test part contains no recording of the
    training part. Silent windows are missing.

    Without `path`, ten chords are plucked on a synthetic guitar (Karplus and Strong, 1983), in a quiet and in a noisy
    room, and analyzed in the same way.

    Args:
        path: Folder with one folder of WAV files per chord. Alternatively a file, folder, pattern or list of these,
            where the name of a file is its chord and a number, such as "am12.wav". Paths are relative to the working
            directory or to `data_dir`. ``None`` synthesizes recordings.
        sample_rate: Samples per second for the analysis. Files with another rate are resampled, files with several
            channels are mixed to one, and both are logged.
        window: Number of samples per window.
        hop: Number of samples from one window to the next.
        min_frequency: Lowest frequency in Hz that is used.
        max_frequency: Highest frequency in Hz that is used.
        compression: Constant c of log(1 + c p) / log(1 + c), which replaces each number p of a profile to increase the
            influence of soft notes. A value of 30 helps to distinguish chords. ``None`` does not compress.
        num_sequences: Number of sequences in all parts together.
        chords_per_sequence: Number of recordings per sequence.
        min_duration: Minimum seconds for which a recording plays, if it is that long. ``None`` plays each to its end.
        max_duration: Maximum seconds for which a recording plays. ``None`` sets no limit.
        recordings: Number of recordings per chord to synthesize if `path` is ``None``.
        **kwargs: Forwarded to `SequenceDataModule`. The fractions refer to the recordings of each chord and to the
            sequences.

    Attributes:
        frame_rate: Steps per second.
        analysis: Conversion of sound to profiles.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = GuitarDataModule(recordings=2, num_sequences=4, val_fraction=0, test_fraction=0.5,
        ...                             data_dir=folder)
        ...     data.setup()
        ...     len(data.train_sequences), data.num_features
        (2, 12)
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        sample_rate: int = 44_100,
        window: int = 8192,
        hop: int = 2048,
        min_frequency: float = 100.0,
        max_frequency: float = 5000.0,
        compression: float | None = None,
        num_sequences: int = 200,
        chords_per_sequence: int = 5,
        min_duration: float | None = 0.5,
        max_duration: float | None = None,
        recordings: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_positive(sample_rate=sample_rate, window=window, hop=hop, min_frequency=min_frequency)
        require_positive(num_sequences=num_sequences, chords_per_sequence=chords_per_sequence, recordings=recordings)
        require_positive(min_duration=min_duration, max_duration=max_duration, compression=compression)
        if not min_frequency < max_frequency <= sample_rate / 2:
            raise ValueError(
                f"`max_frequency` must be greater than `min_frequency` ({min_frequency:g} Hz) and at most half of "
                f"`sample_rate` ({sample_rate / 2:g} Hz), but is {max_frequency:g} instead."
            )
        if min_duration is not None and max_duration is not None and min_duration > max_duration:
            raise ValueError(
                f"`min_duration` must be at most `max_duration` ({max_duration:g} s), but is {min_duration:g} instead."
            )
        self.columns = feature_columns(len(PITCHES), PITCHES)
        self.frame_rate = sample_rate / hop
        self.compression = compression
        self.num_sequences = num_sequences
        self.chords_per_sequence = chords_per_sequence
        self.min_duration = min_duration
        self.max_duration = max_duration
        self.recordings = recordings
        self.analysis = Analysis(sample_rate, window, hop, min_frequency, max_frequency)
        # For each part, (sequences, chords) indices of the recordings and numbers of frames that they play.
        self._played: dict[str, tuple[Tensor, Tensor]] = {}
        self._files = None if path is None else _find_recordings(path, self.data_dir)

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        if self._files is None:
            name = "-".join(map(str, ["plucked", CACHE_VERSION, self.recordings, self.seed, *self.analysis]))
            dataset, _ = self.cached(name, lambda: pluck_recordings(self.analysis, self.recordings, self.seed))
            self.state_names = list(GRIPS)
        else:
            files, options = self._files, [CACHE_VERSION, self.analysis, sorted(set(self._files.values()))]
            dataset, metadata = self.cached(
                cache_name(options, {"train": list(files)}), lambda: read_recordings(self.analysis, files)
            )
            self.state_names = json.loads(metadata["chords"])
            if metadata["conversions"]:
                rank_zero_info(metadata["conversions"])
        table = dataset.with_format("arrow")[:]
        profiles = Sequences.from_arrow(table["values"])
        if self.compression is not None:
            profiles = profiles.with_values((self.compression * profiles.values).log1p() / math.log1p(self.compression))
        chords = Sequences.from_arrow(table["states"]).values[profiles.offsets[:-1]]
        recordings = self._split_recordings(chords)
        order = self.split(self.num_sequences)
        self._played = {}
        made: dict[str, datasets.Dataset] = {}
        for part in PARTS:
            members = order[part]
            count = self.num_sequences if members is None else len(members)
            made[part] = as_dataset(as_table(*self._draw(part, count, profiles, chords, recordings[part])))
        return made

    def _split_recordings(self, chords: Tensor) -> dict[str, Tensor]:
        """Returns the indices of the recordings of each part, with the same fraction of each chord."""
        assert self.state_names is not None
        found: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        for number, name in enumerate(self.state_names):
            here = torch.nonzero(chords == number).squeeze(1)
            for part, members in self.split(len(here)).items():
                fraction = {"val": self.val_fraction, "test": self.test_fraction}.get(part, 1.0)
                if members is not None and fraction > 0 and not len(members):
                    raise ValueError(
                        f"`{part}_fraction` must select at least one recording per chord, but {fraction:g} of the "
                        f"{len(here)} of {name!r} is none. Increase it, set it to 0, or add recordings."
                    )
                found[part].append(here if members is None else here[members])
        return {part: torch.cat(members) for part, members in found.items()}

    def _draw(
        self, part: Part, count: int, profiles: Sequences, chords: Tensor, recordings: Tensor
    ) -> tuple[Sequences, Sequences]:
        """Draws profiles and chords of `count` sequences, each a concatenation of beginnings of random recordings."""
        draw = generator(self.seed, "chords", part)
        if not count or not len(recordings):
            return Sequences.from_lengths(profiles.values[:0], []), Sequences.from_lengths(chords[:0], [])
        chosen = recordings[torch.randint(len(recordings), (count * self.chords_per_sequence,), generator=draw)]
        available = profiles.lengths[chosen]
        longest = self._at_most(available, self.max_duration)
        shortest = self._at_most(longest, self.min_duration)
        uniform = torch.rand(len(chosen), dtype=torch.float64, generator=draw)
        frames = shortest + (uniform * (longest - shortest + 1)).long()
        self._played[part] = (chosen.view(count, -1), frames.view(count, -1))
        starts = profiles.offsets[chosen]
        inside = torch.arange(int(frames.sum())) - (frames.cumsum(0) - frames).repeat_interleave(frames)
        lengths = frames.view(count, -1).sum(1)
        values = profiles.values[starts.repeat_interleave(frames) + inside]
        states = chords[chosen].repeat_interleave(frames)
        return Sequences.from_lengths(values, lengths), Sequences.from_lengths(states, lengths)

    def _at_most(self, frames: Tensor, seconds: float | None) -> Tensor:
        """Limits numbers of frames to a duration, but to no less than one frame."""
        return frames if seconds is None else frames.clamp(max=max(1, round(seconds * self.frame_rate)))

    def sound(self, part: Part, number: int) -> list[Tensor]:
        """Returns the (samples,) of each recording of a sequence, as far as they are covered by its frames.

        Args:
            part: Part of the sequence.
            number: Index of the sequence in the part.
        """
        if part not in self._played:
            raise RuntimeError(
                f"The part {part!r} has no sequences. Call `setup()` of the {type(self).__name__} first."
            )
        chosen, frames = (of_part[number].tolist() for of_part in self._played[part])
        samples = [self.analysis.window + (count - 1) * self.analysis.hop for count in frames]
        return [self._signal(recording)[:length] for recording, length in zip(chosen, samples, strict=True)]

    def _signal(self, recording: int) -> Tensor:
        if self._files is not None:
            return torch.from_numpy(read_signal(list(self._files)[recording], self.analysis.sample_rate)[0])
        chord = list(GRIPS)[recording // self.recordings]
        signals = strum(chord, self.recordings, self.analysis.sample_rate, generator(self.seed, "strum", chord))
        return signals[recording % self.recordings]


class Analysis(NamedTuple):
    """Converts sound to pitch-class profiles. The fields are options of `GuitarDataModule`."""

    sample_rate: int
    window: int
    hop: int
    min_frequency: float
    max_frequency: float

    def profiles(self, signal: Tensor) -> Tensor:
        """Returns the relative energy of the tones C to B in each window: (samples,) -> (frames, 12).

        Silent windows are NaN. An incomplete last window is dropped. A signal shorter than a window is padded with
        zeros.
        """
        signal = torch.nn.functional.pad(signal, (0, max(0, self.window - len(signal))))
        weights = torch.hann_window(self.window, dtype=signal.dtype)
        spectrum = torch.stft(signal, self.window, self.hop, window=weights, center=False, return_complex=True)
        energy = spectrum.abs().square().T @ self.tones().to(signal.dtype)  # (frames, frequencies) -> (frames, tones)
        total = energy.sum(1, keepdim=True)
        return (energy / total).masked_fill(total <= SILENCE * total.max(), torch.nan)

    def tones(self) -> Tensor:
        """Returns (frequencies, 12), which is 1 for the tone nearest to each frequency of the spectrum, else 0."""
        frequencies = torch.arange(self.window // 2 + 1, dtype=torch.float64) * self.sample_rate / self.window
        used = (frequencies >= self.min_frequency) & (frequencies <= self.max_frequency)
        notes = torch.where(used, A4_NOTE + 12 * (frequencies / A4).log2(), 0.0).round().long() % 12
        return torch.nn.functional.one_hot(notes, 12).double() * used.unsqueeze(1)


def _find_recordings(path: str | list[str], data_dir: Path) -> dict[Path, str]:
    """Returns the chord of each file: the name of its folder or, without folders, its own name up to the number."""
    if isinstance(path, str):
        for place in (Path(path).expanduser(), data_dir / path):
            folders = sorted(entry for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
            if found := {
                file: folder.name
                for folder in folders
                for file in sorted(folder.iterdir())
                if file.suffix.lower() == ".wav"
            }:
                return found
    files = find_files(path, data_dir, endings=(".wav",))
    chords = {file: re.split(r"[\d_. -]", file.stem, maxsplit=1)[0] for file in files}
    if nameless := [str(file) for file, chord in chords.items() if not chord]:
        raise ValueError(
            "The name of a file must be its chord and a number, such as 'am12.wav', or the file must be in a folder "
            f"with the name of its chord, but {nameless[0]} is neither."
        )
    return chords


def read_recordings(analysis: Analysis, files: dict[Path, str]) -> pa.Table:
    """Returns one row per recording with its profiles and its chord.

    The metadata contain the names of the chords and a message about converted files.
    """
    chords = sorted(set(files.values()))
    profiles: list[Tensor] = []
    conversions: dict[str, int] = {}
    for path in files:
        signal, rate, channels = read_signal(path, analysis.sample_rate)
        for what, odd in (
            (f"resampled from {rate} to {analysis.sample_rate} Hz", rate != analysis.sample_rate),
            (f"mixed from {channels} channels", channels > 1),
        ):
            if odd:
                conversions[what] = conversions.get(what, 0) + 1
        found = analysis.profiles(torch.from_numpy(signal))
        if bool(found.isnan().all()):
            raise ValueError(
                f"A recording must not be silent, but {path} is silent between {analysis.min_frequency:g} and "
                f"{analysis.max_frequency:g} Hz."
            )
        profiles.append(found)
    message = "; ".join(f"{count} of {len(files)} recordings {what}" for what, count in conversions.items())
    metadata = {"chords": json.dumps(chords), "conversions": message and message + "."}
    table = _recordings_table(profiles, [chords.index(chord) for chord in files.values()])
    return table.replace_schema_metadata(metadata)


def _recordings_table(profiles: list[Tensor], chords: list[int]) -> pa.Table:
    """Returns one row per recording, with its chord as the state of each frame."""
    lengths = torch.tensor([len(frames) for frames in profiles])
    return as_table(
        Sequences.from_lengths(torch.cat(profiles), lengths),
        Sequences.from_lengths(torch.tensor(chords).repeat_interleave(lengths), lengths),
    )


def read_signal(path: Path, sample_rate: int) -> tuple[np.ndarray, int, int]:
    """Returns the same as `read_wav`, with the signal resampled to `sample_rate`."""
    signal, rate, channels = read_wav(path)
    if rate != sample_rate:
        signal = resample_poly(signal, sample_rate // math.gcd(rate, sample_rate), rate // math.gcd(rate, sample_rate))
    return signal, rate, channels


def read_wav(path: Path) -> tuple[np.ndarray, int, int]:
    """Returns the mean of all channels, (samples,) from -1 to 1, the sample rate and the number of channels."""
    try:
        with wave.open(io.BytesIO(_as_plain_pcm(path.read_bytes())), "rb") as file:
            width, rate, channels = file.getsampwidth(), file.getframerate(), file.getnchannels()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise ValueError(
            f"{path} must be a WAV file with integer samples (PCM), but cannot be read as one: "
            f"{error or 'it is truncated'}"
        ) from None
    data = data[: len(data) // (width * channels) * width * channels]
    if not data:
        raise ValueError(f"A recording must not be empty, but {path} has no samples.")
    if width == 1:  # Samples of one byte are unsigned.
        samples = np.frombuffer(data, np.uint8).astype(np.float64) - FULL_SCALE[1]
    elif width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        samples = (wide.view("<i4")[:, 0] >> 8).astype(np.float64)
    else:
        samples = np.frombuffer(data, {2: "<i2", 4: "<i4"}[width]).astype(np.float64)
    return samples.reshape(-1, channels).mean(axis=1) / FULL_SCALE[width], rate, channels


def _as_plain_pcm(data: bytes) -> bytes:
    """Changes the format WAVE_FORMAT_EXTENSIBLE of a WAV file with PCM samples to PCM, which Python 3.11 can read.

    Other files are not changed.
    """
    start = 12  # The chunks follow "RIFF", a size and "WAVE".
    while start + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        if name == b"fmt ":
            extensible = data[start + 8 : start + 10] == b"\xfe\xff" and data[start + 32 : start + 34] == b"\x01\x00"
            return data[: start + 8] + b"\x01\x00" + data[start + 10 :] if extensible else data
        start += 8 + size + size % 2
    return data


def pluck_recordings(analysis: Analysis, recordings: int, seed: int) -> pa.Table:
    """Synthesizes recordings of each chord and returns one row per recording, as `read_recordings`."""
    profiles, chords = [], []
    for number, chord in enumerate(GRIPS):
        for signal in strum(chord, recordings, analysis.sample_rate, generator(seed, "strum", chord)):
            profiles.append(analysis.profiles(signal).double())
            chords.append(number)
    return _recordings_table(profiles, chords)


def strum(chord: str, recordings: int, sample_rate: int, draw: torch.Generator) -> list[Tensor]:
    """Synthesizes recordings of a chord, each (samples,).

    The strings are plucked one after the other, upward or downward, and the noise of a room is added.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=draw)

    samples = (uniform(*DURATION, recordings) * sample_rate).long()
    longest = int(samples.max())
    mix = torch.zeros(recordings, longest)
    gaps = (uniform(0.2, 1.0, recordings) * STRUM * sample_rate).long()
    upwards = uniform(0, 1, recordings) < 0.3
    softness, decay = uniform(0.8, 1.6, recordings), uniform(0.990, 0.998, recordings)
    for string, note in enumerate(GRIPS[chord]):
        frequency = A4 * 2 ** ((note - A4_NOTE) / 12)
        sound = pluck(frequency, longest, sample_rate, softness, decay, draw) * uniform(0.4, 1.0, recordings, 1)
        place = torch.where(upwards, len(GRIPS[chord]) - 1 - string, string)
        for recording, delay in enumerate((gaps * place).tolist()):
            mix[recording, delay:] += sound[recording, : longest - delay]
    rooms = torch.tensor(ROOMS)[torch.arange(recordings) % 2].unsqueeze(1)
    mix += rooms * torch.randn(mix.shape, generator=draw)
    return [signal[:length] for signal, length in zip(mix, samples.tolist(), strict=True)]


def pluck(
    frequency: float, samples: int, sample_rate: int, softness: Tensor, decay: Tensor, draw: torch.Generator
) -> Tensor:
    """Synthesizes a plucked string (Karplus and Strong, 1983), (recordings, samples).

    A burst of noise circulates in a delay line and loses its high frequencies. With a delay of P samples and a mean of
    two neighbors, the period is P + 1/2 samples.

    Args:
        frequency: Frequency in Hz.
        samples: Number of samples.
        sample_rate: Samples per second.
        softness: (recordings,) exponents. Overtone n of the burst has an amplitude of n to the power of minus
            `softness`.
        decay: (recordings,) factors of the amplitude per period.
        draw: Random generator.
    """
    period = max(2, round(sample_rate / frequency - 0.5))
    overtones = torch.arange(1, period // 2 + 1)
    phases = 2 * math.pi * torch.rand(len(decay), len(overtones), generator=draw)
    spectrum = torch.polar(overtones ** -softness.unsqueeze(1), phases)
    block = torch.fft.irfft(torch.nn.functional.pad(spectrum, (1, 0)), period) * period / 4  # The mean is zero.
    before = block.new_zeros(len(decay), 1)  # Last sample of the previous block.
    blocks = [block]
    for _ in range(samples // period):
        shifted = torch.cat([before, block[:, :-1]], dim=1)
        before, block = block[:, -1:], decay.unsqueeze(1) * (block + shifted) / 2
        blocks.append(block)
    return torch.cat(blocks, dim=1)[:, :samples]
