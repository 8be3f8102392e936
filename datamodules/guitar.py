"""Chords of a guitar as pitch-class profiles: from WAV files, or plucked by synthesis; sequences of random recordings."""

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
from datamodules.paths import cache_name, find_files
from lightning_hmm.columns import feature_columns
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

CACHE_VERSION = 1  # raise it whenever the same file and options are read differently
PITCHES = ["C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B"]
A4, A4_NOTE = 440.0, 69  # Hz, and its number in MIDI, where C is a multiple of 12
SILENCE = 1e-8  # energy of a frame, in that of the loudest of its recording, below which it has no profile
FULL_SCALE = {1: 2**7, 2: 2**15, 3: 2**23, 4: 2**31}  # by bytes of a sample

# Chords as they are gripped in the first position, as MIDI notes from the lowest string up
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
DURATION = (1.0, 3.0)  # s, of a drawn recording
STRUM = 0.03  # s, the longest from one string to the next
ROOMS = (0.001, 0.02)  # noise in an anechoic chamber and in a common room, in the level of a string


class GuitarDataModule(SequenceDataModule):
    """Sequences of chords, each step the pitch-class profile of a short window: twelve numbers, C to B, that sum to one unless `compression` is given.

    The spectrum of a window (Hann) is folded into one octave: the energy of each frequency goes to the nearest tone (Fujishima, 1999). Each
    sequence is put together of random recordings, which play for random times; the true states are the chords. Recordings are
    split into parts before sequences are made of them, so that no recording of the test part was heard in training. Silent windows are
    missing.

    Without files, ten chords are plucked on a synthetic guitar (Karplus and Strong, 1983), in a quiet and in a noisy room, and go
    through the same analysis.

    Args:
        path: folder with a folder of WAV files for each chord; or file, folder, pattern or list of them, where a file has the name
            of its chord and a number, "am12.wav"; looked up as given and then under `data_dir`. ``None`` plucks strings.
        sample_rate: samples a second to analyse; files with another rate are resampled, and files with several channels are
            mixed to one, which is said.
        window: samples of a window.
        hop: samples from one window to the next.
        min_frequency: in Hz; what lies below does not count.
        max_frequency: in Hz; what lies above does not count.
        compression: c of log(1 + c p) / log(1 + c), which takes the place of each number p of a profile: soft notes then count beside loud ones.
            30 serves to tell chords apart; ``None`` leaves the profiles as they are.
        num_sequences: of all parts together.
        chords_per_sequence: how many recordings make a sequence.
        min_duration: seconds that a recording plays at least, if it is that long; ``None`` plays each to its end.
        max_duration: seconds that a recording plays at most; ``None`` for as long as it is.
        recordings: of each chord that are plucked without files.
        kwargs: the words of `SequenceDataModule`; the fractions are of the recordings of each chord, and of the sequences.

    Attributes:
        frame_rate: steps a second.
        analysis: from sound to profiles.
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
        sizes: dict[str, float | None] = {
            "sample_rate": sample_rate,
            "window": window,
            "hop": hop,
            "min_frequency": min_frequency,
        }
        sizes |= {"num_sequences": num_sequences, "chords_per_sequence": chords_per_sequence, "recordings": recordings}
        sizes |= {"min_duration": min_duration, "max_duration": max_duration, "compression": compression}
        for name, size in sizes.items():
            if size is not None and not 0 < size < math.inf:
                raise ValueError(f"`{name}` must be positive, but is {size} instead.")
        if not min_frequency < max_frequency <= sample_rate / 2:
            raise ValueError(
                f"`max_frequency` must be above the {min_frequency:g} Hz of `min_frequency` and at most {sample_rate / 2:g}, half of `sample_rate`, "
                f"but is {max_frequency:g} instead."
            )
        if min_duration is not None and max_duration is not None and min_duration > max_duration:
            raise ValueError(
                f"`min_duration` must not be longer than `max_duration`, but is {min_duration:g} and {max_duration:g} s instead."
            )
        self.columns = feature_columns(len(PITCHES), PITCHES)
        self.frame_rate = sample_rate / hop
        self.num_sequences, self.chords_per_sequence, self.recordings = num_sequences, chords_per_sequence, recordings
        self.min_duration, self.max_duration, self.compression = min_duration, max_duration, compression
        self.analysis = Analysis(sample_rate, window, hop, min_frequency, max_frequency)
        self._played: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # for each part (sequences, chords): which recordings, and how many frames of them
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
            if metadata["said"]:
                rank_zero_info(metadata["said"])
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
        """The numbers of the recordings of each part, the same share of each chord."""
        assert self.state_names is not None
        found: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        for number, name in enumerate(self.state_names):
            here = torch.nonzero(chords == number).squeeze(1)
            for part, members in self.split(len(here)).items():
                fraction = {"val": self.val_fraction, "test": self.test_fraction}.get(part, 1.0)
                if members is not None and fraction > 0 and not len(members):
                    raise ValueError(
                        f"`{part}_fraction` must leave at least one recording of each chord, but {fraction:g} of the {len(here)} of {name!r} is none. "
                        "Raise it, set it to 0, or give more recordings."
                    )
                found[part].append(here if members is None else here[members])
        return {part: torch.cat(members) for part, members in found.items()}

    def _draw(
        self, part: Part, count: int, profiles: Sequences, chords: Tensor, recordings: Tensor
    ) -> tuple[Sequences, Sequences]:
        """Profiles and chords of so many sequences: a random beginning of each of some random recordings, one after the other."""
        draw = generator(self.seed, "chords", part)
        if not count or not len(recordings):
            return Sequences.from_lengths(profiles.values[:0], []), Sequences.from_lengths(chords[:0], [])
        chosen = recordings[torch.randint(len(recordings), (count * self.chords_per_sequence,), generator=draw)]
        available = profiles.lengths[chosen]
        longest = (
            available
            if self.max_duration is None
            else available.clamp(max=max(1, round(self.max_duration * self.frame_rate)))
        )
        shortest = (
            longest
            if self.min_duration is None
            else longest.clamp(max=max(1, round(self.min_duration * self.frame_rate)))
        )
        frames = (
            shortest + (torch.rand(len(chosen), dtype=torch.float64, generator=draw) * (longest - shortest + 1)).long()
        )
        self._played[part] = (chosen.view(count, -1), frames.view(count, -1))
        starts = profiles.offsets[chosen]
        inside = torch.arange(int(frames.sum())) - (frames.cumsum(0) - frames).repeat_interleave(frames)
        lengths = frames.view(count, -1).sum(1)
        values = profiles.values[starts.repeat_interleave(frames) + inside]
        return Sequences.from_lengths(values, lengths), Sequences.from_lengths(
            chords[chosen].repeat_interleave(frames), lengths
        )

    def sound(self, part: Part, number: int) -> list[Tensor]:
        """What a sequence was made of: (samples,) of each of its recordings, as far as the windows of its frames reach."""
        if part not in self._played:
            raise RuntimeError(
                f"There are no sequences of the part {part!r}. Call `setup()` of the {type(self).__name__} first."
            )
        chosen, frames = (of_part[number].tolist() for of_part in self._played[part])
        samples = [self.analysis.window + (count - 1) * self.analysis.hop for count in frames]
        return [self._signal(recording)[:length] for recording, length in zip(chosen, samples, strict=True)]

    def _signal(self, recording: int) -> Tensor:
        if self._files is not None:
            return torch.from_numpy(read_signal(list(self._files)[recording], self.analysis.sample_rate)[0])
        chord = list(GRIPS)[recording // self.recordings]
        return strum(chord, self.recordings, self.analysis.sample_rate, generator(self.seed, "strum", chord))[
            recording % self.recordings
        ]


class Analysis(NamedTuple):
    """From sound to pitch-class profiles; the fields are the words of `GuitarDataModule`."""

    sample_rate: int
    window: int
    hop: int
    min_frequency: float
    max_frequency: float

    def profiles(self, signal: Tensor) -> Tensor:
        """(samples,) -> (frames, 12) energy of the tones C to B in each window, of their sum; NaN in silent windows.

        What does not fill a last window is left out; a signal shorter than a window is filled up with zeros.
        """
        signal = torch.nn.functional.pad(signal, (0, max(0, self.window - len(signal))))
        weights = torch.hann_window(self.window, dtype=signal.dtype)
        spectrum = torch.stft(signal, self.window, self.hop, window=weights, center=False, return_complex=True)
        energy = spectrum.abs().square().T @ self.tones().to(signal.dtype)  # (frames, frequencies) -> (frames, tones)
        total = energy.sum(1, keepdim=True)
        return (energy / total).masked_fill(total <= SILENCE * total.max(), torch.nan)

    def tones(self) -> Tensor:
        """(frequencies, 12) one where a frequency of the spectrum is nearest to a tone."""
        frequencies = torch.arange(self.window // 2 + 1, dtype=torch.float64) * self.sample_rate / self.window
        used = (frequencies >= self.min_frequency) & (frequencies <= self.max_frequency)
        notes = torch.where(used, A4_NOTE + 12 * (frequencies / A4).log2(), 0.0).round().long() % 12
        return torch.nn.functional.one_hot(notes, 12).double() * used.unsqueeze(1)


def _find_recordings(path: str | list[str], data_dir: Path) -> dict[Path, str]:
    """The chord of each file: the name of its folder if there is a folder for each, or else its own name up to the number."""
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
            f"A file must have the name of its chord and a number, 'am12.wav', or lie in a folder of that name, but {nameless[0]} does not."
        )
    return chords


def read_recordings(analysis: Analysis, files: dict[Path, str]) -> pa.Table:
    """A row with the profiles and the chord of each recording; the metadata has the names of the chords and what to say."""
    chords = sorted(set(files.values()))
    profiles: list[Tensor] = []
    rates: dict[str, int] = {}
    for path in files:
        signal, rate, channels = read_signal(path, analysis.sample_rate)
        for what, odd in (
            (f"resampled from {rate} to {analysis.sample_rate} Hz", rate != analysis.sample_rate),
            (f"mixed from {channels} channels", channels > 1),
        ):
            if odd:
                rates[what] = rates.get(what, 0) + 1
        found = analysis.profiles(torch.from_numpy(signal))
        if bool(found.isnan().all()):
            raise ValueError(
                f"A recording must hold some sound, but {path} is silent between {analysis.min_frequency:g} and {analysis.max_frequency:g} Hz."
            )
        profiles.append(found)
    said = "; ".join(f"{count} of {len(files)} recordings {what}" for what, count in rates.items())
    metadata = {"chords": json.dumps(chords), "said": said and said + "."}
    return _recordings_table(profiles, [chords.index(chord) for chord in files.values()]).replace_schema_metadata(
        metadata
    )


def _recordings_table(profiles: list[Tensor], chords: list[int]) -> pa.Table:
    lengths = torch.tensor([len(frames) for frames in profiles])
    return as_table(
        Sequences.from_lengths(torch.cat(profiles), lengths),
        Sequences.from_lengths(torch.tensor(chords).repeat_interleave(lengths), lengths),
    )


def read_signal(path: Path, sample_rate: int) -> tuple[np.ndarray, int, int]:
    """As `read_wav`, but with so many samples a second; and how many there were."""
    signal, rate, channels = read_wav(path)
    if rate != sample_rate:
        signal = resample_poly(signal, sample_rate // math.gcd(rate, sample_rate), rate // math.gcd(rate, sample_rate))
    return signal, rate, channels


def read_wav(path: Path) -> tuple[np.ndarray, int, int]:
    """(samples,) between -1 and 1, the mean of all channels; samples a second; channels."""
    try:
        with wave.open(io.BytesIO(_as_plain_pcm(path.read_bytes())), "rb") as file:
            width, rate, channels = file.getsampwidth(), file.getframerate(), file.getnchannels()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise ValueError(
            f"{path} must be a WAV file of whole-number samples (PCM), but cannot be read as one: {error or 'it is cut off'}"
        ) from None
    data = data[: len(data) // (width * channels) * width * channels]
    if not data:
        raise ValueError(f"A recording must not be empty, but {path} has no samples.")
    if width == 1:  # without a sign
        samples = np.frombuffer(data, np.uint8).astype(np.float64) - FULL_SCALE[1]
    elif width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        samples = (wide.view("<i4")[:, 0] >> 8).astype(np.float64)
    else:
        samples = np.frombuffer(data, {2: "<i2", 4: "<i4"}[width]).astype(np.float64)
    return samples.reshape(-1, channels).mean(axis=1) / FULL_SCALE[width], rate, channels


def _as_plain_pcm(data: bytes) -> bytes:
    """A WAV file whose format is WAVE_FORMAT_EXTENSIBLE with PCM samples as one whose format is PCM, which Python 3.11 can read; any other as it is."""
    start = 12  # after "RIFF", a size and "WAVE"
    while start + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        if name == b"fmt ":
            extensible = data[start + 8 : start + 10] == b"\xfe\xff" and data[start + 32 : start + 34] == b"\x01\x00"
            return data[: start + 8] + b"\x01\x00" + data[start + 10 :] if extensible else data
        start += 8 + size + size % 2
    return data


def pluck_recordings(analysis: Analysis, recordings: int, seed: int) -> pa.Table:
    """The same for plucked strings: each chord strummed so many times."""
    profiles, chords = [], []
    for number, chord in enumerate(GRIPS):
        for signal in strum(chord, recordings, analysis.sample_rate, generator(seed, "strum", chord)):
            profiles.append(analysis.profiles(signal).double())
            chords.append(number)
    return _recordings_table(profiles, chords)


def strum(chord: str, recordings: int, sample_rate: int, draw: torch.Generator) -> list[Tensor]:
    """Recordings of a chord, each (samples,): its strings plucked one after the other, up or down, and the noise of a room."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=draw)

    samples = (uniform(*DURATION, recordings) * sample_rate).long()
    longest = int(samples.max())
    mix = torch.zeros(recordings, longest)
    gaps, upwards = (uniform(0.2, 1.0, recordings) * STRUM * sample_rate).long(), uniform(0, 1, recordings) < 0.3
    softness, decay = uniform(0.8, 1.6, recordings), uniform(0.990, 0.998, recordings)
    for string, note in enumerate(GRIPS[chord]):
        sound = pluck(A4 * 2 ** ((note - A4_NOTE) / 12), longest, sample_rate, softness, decay, draw) * uniform(
            0.4, 1.0, recordings, 1
        )
        place = torch.where(upwards, len(GRIPS[chord]) - 1 - string, string)
        for recording, delay in enumerate((gaps * place).tolist()):
            mix[recording, delay:] += sound[recording, : longest - delay]
    rooms = torch.tensor(ROOMS)[torch.arange(recordings) % 2].unsqueeze(1)
    mix += rooms * torch.randn(mix.shape, generator=draw)
    return [signal[:length] for signal, length in zip(mix, samples.tolist(), strict=True)]


def pluck(
    frequency: float, samples: int, sample_rate: int, softness: Tensor, decay: Tensor, draw: torch.Generator
) -> Tensor:
    """(recordings, samples) of a string (Karplus and Strong, 1983): a burst of noise that goes around a delay line and loses its high tones.

    Overtone n of the burst is as strong as n to the power of minus `softness` (recordings,), as a plucking finger is softer than a step;
    `decay` (recordings,) is what is left after each round. A round of a delay of P samples and the mean of two neighbours takes P + 1/2.
    """
    period = max(2, round(sample_rate / frequency - 0.5))
    overtones = torch.arange(1, period // 2 + 1)
    phases = 2 * math.pi * torch.rand(len(decay), len(overtones), generator=draw)
    spectrum = torch.polar(overtones ** -softness.unsqueeze(1), phases)
    block = torch.fft.irfft(torch.nn.functional.pad(spectrum, (1, 0)), period) * period / 4  # no constant part
    before = block.new_zeros(len(decay), 1)  # the last sample of the block before
    blocks = [block]
    for _ in range(samples // period):
        shifted = torch.cat([before, block[:, :-1]], dim=1)
        before, block = block[:, -1:], decay.unsqueeze(1) * (block + shifted) / 2
        blocks.append(block)
    return torch.cat(blocks, dim=1)[:, :samples]
