"""What the guide of NeMo 0.10 takes for granted: a factory, a data layer of spoken digits, a network, tensors."""

from __future__ import annotations

import sys
import wave
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cadenza.compat.nemo10 as nemo

RATE = 8000  # samples a second
LENGTH = 4000  # samples of a sound; shorter ones are padded


def sounds_in(folder: Path) -> tuple[Tensor, Tensor]:
    """Return waves, shape (sounds, samples), from -1 to 1, and the digits that are said."""
    waves, digits = [], []
    for path in sorted(folder.glob("*.wav")):
        with wave.open(str(path)) as file:
            samples = torch.frombuffer(bytearray(file.readframes(LENGTH)), dtype=torch.int16) / 2**15
        waves.append(nn.functional.pad(samples, (0, LENGTH - len(samples))))
        digits.append(int(path.name[0]))
    return torch.stack(waves), torch.tensor(digits)


class Listener(nn.Module):
    """Recognizes a digit by the loudness of pitches in short pieces of a sound."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Sequential(nn.Flatten(), nn.Linear(20 * 101, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, waves: Tensor) -> Tensor:
        pieces = waves.unflatten(1, (20, 200))
        scores: Tensor = self.classify(torch.log1p(torch.fft.rfft(pieces).abs()))
        return scores


def loader(waves: Tensor, digits: Tensor, *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(waves, digits), batch_size=25, shuffle=shuffle)


neural_factory = nemo.core.NeuralModuleFactory(log_dir="work", create_tb_writer=True, random_seed=1)
waves, digits = sounds_in(Path(sys.argv[1]))
listener = nemo.backends.pytorch.nm.TrainableNM.of(Listener(), ["wave"], ["scores"])
cross_entropy = nemo.backends.pytorch.nm.LossNM.of(nn.functional.cross_entropy, ["scores", "digit"])

wave_tensor, digit = nemo.backends.pytorch.nm.DataLayerNM.of(
    loader(waves[::2], digits[::2], shuffle=True), ["wave", "digit"], name="train"
)()
train_loss = cross_entropy(scores=listener(wave=wave_tensor), digit=digit)

eval_wave, eval_digit = nemo.backends.pytorch.nm.DataLayerNM.of(
    loader(waves[1::2], digits[1::2], shuffle=False), ["wave", "digit"], name="eval"
)()
eval_scores = listener(wave=eval_wave)
eval_scores.rename("scores")
eval_digit.rename("digit")
