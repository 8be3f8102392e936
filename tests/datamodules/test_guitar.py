"""Chords as pitch-class profiles: WAV formats, profiles of tones and chords, sequences of recordings, wrong files."""

import logging
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import GuitarDataModule
from datamodules.guitar import GRIPS, PITCHES, Analysis, pluck, read_wav, strum
from lightning_hmm.random import generator

HEARD = Analysis(44_100, 8192, 2048, 100.0, 5000.0)
SMALL = {"recordings": 3, "num_sequences": 9, "val_fraction": 0.34, "test_fraction": 0.34}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory; caches go to data/cache in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_HMM_DATA", raising=False)
    return tmp_path


def tone(frequency: float, seconds: float = 0.5, rate: int = 44_100) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def write(name: str, signal: np.ndarray, rate: int = 44_100, width: int = 2) -> str:
    """(samples,) or (samples, channels) between -1 and 1."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    numbers = np.round(signal * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    data = (
        (numbers + 128).astype(np.uint8).tobytes()
        if width == 1
        else numbers.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    )
    with wave.open(name, "wb") as file:
        file.setnchannels(1 if signal.ndim == 1 else signal.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return name


def ready(path=None, **words) -> GuitarDataModule:
    data = GuitarDataModule(path, **words)
    data.setup()
    return data


class TestAnalysis:
    @pytest.mark.parametrize(
        ("frequency", "pitch"),
        [(440.0, "A"), (261.63, "C"), (246.94, "B"), (1864.66, "A#"), (110.0, "A"), (4186.0, "C")],
    )
    def test_a_tone_is_its_pitch(self, frequency, pitch):
        profiles = HEARD.profiles(torch.from_numpy(tone(frequency)))
        assert profiles.shape == ((22_050 - 8192) // 2048 + 1, 12)
        torch.testing.assert_close(profiles.sum(1), torch.ones(len(profiles), dtype=torch.float64))
        assert float(profiles[:, PITCHES.index(pitch)].min()) > 0.95

    def test_against_a_loop_over_windows_and_frequencies(self, rng):
        analysis = Analysis(8000, 256, 100, 200.0, 3000.0)
        signal = rng.normal(size=700)
        expected = []
        for start in range(0, 700 - 256 + 1, 100):
            n = np.arange(256)
            piece = signal[start : start + 256] * (0.5 - 0.5 * np.cos(2 * np.pi * n / 256))
            energy = np.zeros(12)
            for k in range(129):
                frequency = k * 8000 / 256
                if 200 <= frequency <= 3000:
                    energy[round(12 * np.log2(frequency / 440) + 9) % 12] += (
                        abs((piece * np.exp(-2j * np.pi * k * n / 256)).sum()) ** 2
                    )
            expected.append(energy / energy.sum())
        torch.testing.assert_close(
            analysis.profiles(torch.from_numpy(signal)), torch.from_numpy(np.array(expected)), rtol=1e-9, atol=1e-12
        )

    def test_silence_is_missing_and_short_signals_are_filled_up(self):
        signal = torch.from_numpy(np.concatenate([tone(440.0, 0.4), np.zeros(20_000)]))
        missing = HEARD.profiles(signal).isnan()
        assert missing.all(dim=1).tolist() == missing.any(dim=1).tolist() == [False] * 9 + [True] * (len(missing) - 9)
        assert HEARD.profiles(torch.from_numpy(tone(440.0, 0.05))).shape == (1, 12)

    @pytest.mark.parametrize("note", [40, 52, 59, 67])
    def test_a_plucked_string_has_its_pitch_and_fades(self, note):
        frequency = 440.0 * 2 ** ((note - 69) / 12)
        sound = pluck(frequency, 40_000, 44_100, torch.ones(1), torch.full((1,), 0.99), generator(0, "test"))[
            0
        ].double()
        spectrum = torch.fft.rfft(sound * torch.hann_window(40_000, dtype=torch.float64), 2**18).abs()
        around = slice(int(0.94 * frequency * 2**18 / 44_100), int(1.06 * frequency * 2**18 / 44_100))
        peak = (spectrum[around].argmax().item() + around.start) * 44_100 / 2**18
        assert abs(12 * np.log2(peak / frequency)) < 0.15  # semitones
        assert sound[-4000:].square().mean() < 0.5 * sound[:4000].square().mean()

    def test_plucking_is_the_recursion(self):
        """y_n = d (y_{n-P} + y_{n-P-1}) / 2, sample by sample."""
        sound = pluck(4410.0, 60, 44_100, torch.ones(2), torch.tensor([0.9, 0.5]), generator(0, "test"))
        period = round(10 - 0.5)
        for n in range(period, 60):
            earlier = sound[:, n - period - 1] if n > period else torch.zeros(2)
            torch.testing.assert_close(sound[:, n], torch.tensor([0.9, 0.5]) * (sound[:, n - period] + earlier) / 2)

    def test_the_tones_of_a_strummed_chord_are_heard(self):
        for chord, notes in GRIPS.items():
            profile = HEARD.profiles(strum(chord, 1, 44_100, generator(0, chord))[0]).mean(0)
            assert float(profile[sorted({note % 12 for note in notes})].sum()) > 0.65, chord  # chance is 0.25


class TestFiles:
    @pytest.mark.parametrize("width", [1, 2, 3, 4])
    def test_widths_and_channels(self, width):
        left, right = tone(440.0, 0.1), tone(660.0, 0.1)
        found, rate, channels = read_wav(Path(write("x.wav", np.stack([left, right], axis=1), 22_050, width)))
        assert (rate, channels) == (22_050, 2)
        np.testing.assert_allclose(found, (left + right) / 2, rtol=0, atol=1.5 / 2 ** (8 * width - 1))

    @pytest.mark.parametrize("width", [2, 3, 4])
    def test_extensible_format(self, width):
        """Many programs write 24 bits or several channels as WAVE_FORMAT_EXTENSIBLE, which has a longer header."""
        plain = Path(write("x.wav", np.stack([tone(440.0, 0.1), tone(660.0, 0.1)], axis=1), 22_050, width)).read_bytes()
        kind = b"\x01\x00\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71"  # PCM
        header = (
            struct.pack("<4sI", b"fmt ", 40)
            + struct.pack("<H", 0xFFFE)
            + plain[22:36]
            + struct.pack("<HHI", 22, 8 * width, 3)
        )
        note = b"LIST" + struct.pack("<I", 3) + b"abc\x00"  # a chunk of odd length is followed by a byte of padding
        body = b"WAVE" + note + header + kind + plain[36:]
        Path("y.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
        for found, expected in zip(read_wav(Path("y.wav")), read_wav(Path("x.wav")), strict=True):
            np.testing.assert_array_equal(found, expected)
        Path("y.wav").write_bytes(
            Path("y.wav").read_bytes().replace(kind, b"\x03" + kind[1:])
        )  # floating-point numbers
        with pytest.raises(
            ValueError, match=r"y.wav must be a WAV file with integer samples \(PCM\), but cannot be read as one"
        ):
            read_wav(Path("y.wav"))

    def test_a_folder_for_each_chord_or_names(self, caplog):
        for n, (chord, frequency) in enumerate([("am", 440.0), ("am", 440.0), ("c", 261.63)]):
            write(f"chords/{chord}/{n}.wav", tone(frequency))
            write(f"flat/{chord}{n}.wav", tone(frequency))
        words = {"val_fraction": 0.0, "test_fraction": 0.0, "num_sequences": 6}
        data, flat = ready("chords", **words), ready("flat", **words)
        assert data.state_names == flat.state_names == ["am", "c"]
        assert torch.equal(data.train_sequences.values, flat.train_sequences.values)
        heard = data.train_sequences.values.argmax(1)
        assert torch.equal(
            heard, torch.tensor([PITCHES.index("A"), PITCHES.index("C")])[data.true_states("train").values]
        )
        write("flat/c7.wav", np.stack([tone(261.63, rate=48_000)] * 2, axis=1), 48_000)
        with caplog.at_level(logging.INFO):
            again = ready("flat", **words)
        assert (
            "1 of 4 recordings resampled from 48000 to 44100 Hz; 1 of 4 recordings mixed from 2 channels."
            in caplog.text
        )
        assert torch.equal(
            again.train_sequences.values.argmax(1), torch.tensor([9, 0])[again.true_states("train").values]
        )
        torch.testing.assert_close(
            torch.cat([HEARD.profiles(piece) for piece in again.sound("train", 3)]), again.train_sequences[3]
        )

    def test_bad_ones(self):
        write("e/e1.wav", np.zeros(0))
        with pytest.raises(ValueError, match=r"A recording must not be empty, but e/e1.wav has no samples"):
            ready("e/e1.wav")
        write("e/e1.wav", np.zeros(30_000))
        with pytest.raises(
            ValueError, match=r"A recording must not be silent, but e/e1.wav is silent between 100 and 5000 Hz"
        ):
            ready("e/e1.wav")
        Path("e/e2.wav").write_bytes(b"RIFF....")
        with pytest.raises(
            ValueError, match=r"e/e2.wav must be a WAV file with integer samples \(PCM\), but cannot be read as one"
        ):
            ready("e/e2.wav")
        write("12.wav", tone(440.0))
        with pytest.raises(
            ValueError,
            match=r"must be its chord and a number, such as 'am12.wav', .* but 12.wav is neither",
        ):
            GuitarDataModule("12.wav")
        write("e/e2.wav", tone(440.0))
        with pytest.raises(
            ValueError,
            match=r"`val_fraction` must select at least one recording per chord, but 0.1 of the 1 of 'e' is none",
        ):
            ready("e/e2.wav")


class TestSequences:
    def test_recordings_of_parts_are_apart(self):
        data = ready(**SMALL)
        assert (data.num_features, data.state_names) == (12, list(GRIPS))
        frames = [
            {tuple(row) for row in part.values.tolist()}
            for part in (data.train_sequences, data.val_sequences, data.test_sequences)
        ]
        assert all(frames)
        assert len(set.union(*frames)) == sum(map(len, frames))
        assert [len(part) for part in (data.train_sequences, data.val_sequences, data.test_sequences)] == [3, 3, 3]
        again, other = ready(**SMALL), ready(**SMALL, chords_per_sequence=4)
        assert torch.equal(again.train_sequences.values, data.train_sequences.values)
        assert not torch.equal(other.train_sequences.lengths, data.train_sequences.lengths)
        torch.testing.assert_close(
            torch.cat([HEARD.profiles(piece).double() for piece in data.sound("val", 1)]), data.val_sequences[1]
        )

    def test_compression_raises_soft_notes(self):
        plain, compressed = (ready(**SMALL, compression=compression).test_sequences for compression in (None, 30.0))
        torch.testing.assert_close(compressed.values, (1 + 30 * plain.values).log() / np.log(31), equal_nan=True)
        assert compressed.lengths.tolist() == plain.lengths.tolist()

    def test_durations(self):
        words = {
            "recordings": 2,
            "num_sequences": 300,
            "chords_per_sequence": 1,
            "val_fraction": 0.0,
            "test_fraction": 0.0,
        }
        whole, some = ready(**words, min_duration=None), ready(**words, min_duration=0.3, max_duration=0.6)
        assert len(set(whole.train_sequences.lengths.tolist())) <= 20
        assert sorted(set(some.train_sequences.lengths.tolist())) == list(
            range(round(0.3 * 44_100 / 2048), round(0.6 * 44_100 / 2048) + 1)
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"hop": 0}, "`hop` must be positive, but is 0 instead"),
        ({"compression": 0}, "`compression` must be positive, but is 0 instead"),
        ({"chords_per_sequence": 0}, "`chords_per_sequence` must be positive, but is 0 instead"),
        (
            {"max_frequency": 50},
            r"`max_frequency` must be greater than `min_frequency` \(100 Hz\) and at most half of "
            r"`sample_rate` \(22050 Hz\), but is 50 instead",
        ),
        (
            {"min_duration": 2.0, "max_duration": 1.0},
            r"`min_duration` must be at most `max_duration` \(1 s\), but is 2 instead",
        ),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        GuitarDataModule(**words)
