"""Training runs that can be interrupted at any time and resumed to the same result."""

from __future__ import annotations

import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo.experiments.images import Batches, Images, plain_batches
from proxmo.experiments.networks import ResNet18
from proxmo.experiments.store import Store

EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Setting:
    """What determines a training run, apart from the data and the method."""

    lr: float
    momentum: float
    batch: int
    epochs: int
    width: int
    seed: int
    annealed: bool = False
    """Whether lr and 1 − momentum fall to 0 together, along a cosine; otherwise lr is cut, if the method does so."""


@dataclass(frozen=True)
class Epoch:
    """The measurements after an epoch."""

    train_loss: float
    """The mean of f over the mini-batches of the epoch."""
    test_loss: float
    test_accuracy: float
    penalty: float
    """The value of ψ, or 0 if it is unknown."""
    zero_weights: float
    """The share of penalised weights that are zero."""
    zero_channels: float
    """The share of penalised output channels that are zero."""

    @property
    def objective(self) -> float:
        """F = f + ψ."""
        return self.train_loss + self.penalty


@dataclass(frozen=True)
class Record:
    """A finished run."""

    setting: Setting
    epochs: list[Epoch]
    """All epochs, or those before the run diverged."""
    diverged: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        epochs = [Epoch(**epoch) for epoch in data["epochs"]]
        if not (epochs or data["diverged"]):
            raise ValueError("no epochs")
        return cls(Setting(**data["setting"]), epochs, data["diverged"], data["seconds"])

    @property
    def last(self) -> Epoch:
        """The last epoch of a run that did not diverge."""
        return self.epochs[-1]


class Trainer(ABC):
    """A network and its optimizer; subclasses define how to train an epoch.

    Args:
        setting: what determines the run.
        images: the data.
        device: where to train.
    """

    def __init__(self, setting: Setting, images: Images, device: str) -> None:
        if setting.width < 8:  # torch 2.13 corrupts memory in narrower channels-last CPU convolutions
            raise ValueError(f"width must be an integer >= 8, got {setting.width}")
        self.setting, self.images, self.device = setting, images, device
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            network = ResNet18(setting.width, images.channels, images.classes)
        self.network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = MixedPrecision(self.network, device)
        self.generator = torch.Generator().manual_seed(setting.seed)
        self.batches = Batches(images, setting.batch, self.generator, device=device)

    @abstractmethod
    def train_epoch(self) -> float:
        """Train for one epoch and return the mean training loss."""

    @abstractmethod
    def measures(self) -> dict[str, float]:
        """Return ``penalty``, ``zero_weights`` and ``zero_channels`` of an `Epoch`."""

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """Return the stateful objects other than the network and the generator; each has a ``state_dict``."""

    def state(self) -> dict[str, Any]:
        """Return the complete state as plain data and tensors."""
        parts = {"network": self.network, **self.parts()}
        return {**{name: part.state_dict() for name, part in parts.items()}, "generator": self.generator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        for name, part in {"network": self.network, **self.parts()}.items():
            part.load_state_dict(state[name])
        self.generator.set_state(state["generator"])

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Return loss and accuracy on the test images."""
        self.network.eval()
        loss, correct, count = 0.0, 0, 0
        for inputs, labels in plain_batches(self.images, self.images.test, EVALUATION_BATCH, self.device):
            scores = self.model(inputs)
            loss += float(functional.cross_entropy(scores, labels)) * len(labels)
            correct += int((scores.argmax(1) == labels).sum())
            count += len(labels)
        self.network.train()
        return loss / count, correct / count


def _next_epoch(trainer: Trainer) -> Epoch | None:
    """Train and measure one epoch; return ``None`` if a number is not finite."""
    try:
        train_loss = trainer.train_epoch()
    except FloatingPointError:
        return None
    test_loss, accuracy = trainer.test()
    epoch = Epoch(train_loss, test_loss, accuracy, **trainer.measures())
    return epoch if all(map(math.isfinite, asdict(epoch).values())) else None


class MixedPrecision(nn.Module):
    """Run a network in bfloat16 where that is fast; return float32 scores."""

    def __init__(self, network: nn.Module, device: str) -> None:
        super().__init__()
        self.network = network
        self._kind, self._half = device.split(":")[0], has_fast_bfloat16(device)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(self._kind, torch.bfloat16, enabled=self._half):
            scores: Tensor = self.network(images)
        return scores.float()


def has_fast_bfloat16(device: str) -> bool:
    """Return whether to train in bfloat16: on GPUs that have it in hardware.

    CPUs train in float32, so that all of them give the same report. Most would be slower in bfloat16.
    """
    if not device.startswith("cuda"):
        return False
    if not torch.cuda.is_available():  # where jobs are only submitted; each checks it where it runs
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def run_name(experiment: str, setting: Setting) -> str:
    """Return a readable file name for a run, unique for each setting.

    >>> run_name("regularized", Setting(lr=0.1, momentum=0.9, batch=256, epochs=10, width=8, seed=0))
    'regularized-batch256-lr0.1-momentum0.9-seed0-3326ab'
    """
    digest = hashlib.sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()[:6]
    s, annealed = setting, "-annealed" if setting.annealed else ""
    return f"{experiment}-batch{s.batch}-lr{s.lr:g}-momentum{s.momentum:g}{annealed}-seed{s.seed}-{digest}"


def train(
    make: Callable[[], Trainer], experiment: str, setting: Setting, store: Store, advance: Callable[[int], None]
) -> Record:
    """Return the record of a run; if it is not in the store, train from the last checkpoint or from the start.

    Args:
        make: makes a new trainer.
        experiment: the prefix of the name of the run.
        setting: the setting of the run.
        store: holds records and checkpoints.
        advance: called with the number of epochs done since the last call.
    """
    name = run_name(experiment, setting)
    finished: Record | None = store.record(name, Record.from_json)
    if finished is not None:
        advance(setting.epochs)
        return finished
    with store.claimed(name):
        if store.record(name) is not None:  # another process has finished it in the meantime
            return train(make, experiment, setting, store, advance)
        return _train_claimed(make(), name, setting, store, advance)


def _train_claimed(
    trainer: Trainer, name: str, setting: Setting, store: Store, advance: Callable[[int], None]
) -> Record:
    epochs: list[Epoch] = []
    seconds = 0.0
    diverged = False
    checkpoint = store.load(name)
    if checkpoint is not None:
        try:
            trainer.set_state(checkpoint["trainer"])
            epochs = [Epoch(**epoch) for epoch in checkpoint["epochs"]]
            seconds = checkpoint["seconds"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise store.damaged(name, f"it does not match: {error}") from error
        advance(len(epochs))
    while len(epochs) < setting.epochs:
        start = time.perf_counter()
        epoch = _next_epoch(trainer)
        seconds += time.perf_counter() - start
        if epoch is None:
            diverged = True
            advance(setting.epochs - len(epochs))
            break
        epochs.append(epoch)
        state = {"trainer": trainer.state(), "epochs": [asdict(epoch) for epoch in epochs], "seconds": seconds}
        store.save(name, state)
        advance(1)
    record = Record(setting, epochs, diverged, seconds)
    store.finish(name, record.to_json())
    return record
