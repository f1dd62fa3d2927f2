"""Regularized training (section 8.2): ResNet-18 with an ℓ∞,1 penalty on the weights of every layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from proxmo import CosineRates, GroupLInf, ProxSGD, RateScheduler
from proxmo.experiments.comparison import (
    OBJECTIVE,
    PENALTY,
    TEST_ACCURACY,
    TRAIN_LOSS,
    ZERO_CHANNELS,
    ZERO_WEIGHTS,
    TrainingExperiment,
)
from proxmo.experiments.experiment import STRENGTH, Options
from proxmo.experiments.images import Images
from proxmo.experiments.presets import Grid, Presets, Size
from proxmo.experiments.training import Setting, Trainer

MILESTONES = (150 / 300, 250 / 300)  # when lr drops to a tenth, as fractions of the epochs


class RegularizedTrainer(Trainer):
    """`ProxSGD` with one group per output channel of each convolution and of the head, and no penalty elsewhere.

    Args:
        setting, images, device: as for every `Trainer`.
        strength: of the penalty.

    >>> from proxmo.experiments import data
    >>> setting = Setting(lr=0.1, momentum=0.9, batch=256, epochs=2, width=8, seed=0)
    >>> trainer = RegularizedTrainer(setting, data.load("digits"), "cpu")
    >>> 0 < trainer.train_epoch() < 10
    True
    """

    def __init__(self, setting: Setting, images: Images, device: str, strength: float = STRENGTH) -> None:
        super().__init__(setting, images, device)
        weights = [p for p in self.network.parameters() if p.dim() > 1]
        others = [p for p in self.network.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": weights, "penalty": GroupLInf(strength, dim=0)}, {"params": others}]
        self.optimizer = ProxSGD(groups, setting.lr, setting.momentum)
        self.scheduler: LRScheduler
        if setting.annealed:
            rates = CosineRates(setting.lr, setting.momentum, horizon=setting.epochs * len(self.batches))
            self.scheduler = RateScheduler(self.optimizer, rates)  # steps after every batch
        else:
            milestones = [round(fraction * setting.epochs) for fraction in MILESTONES]
            self.scheduler = MultiStepLR(self.optimizer, milestones, gamma=0.1)  # steps after every epoch

    def train_epoch(self) -> float:
        total = 0.0
        for inputs, labels in self.batches:
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.setting.annealed:
                self.scheduler.step()
            total += float(loss.detach())
        if not self.setting.annealed:
            self.scheduler.step()
        return total / len(self.batches)

    def measures(self) -> dict[str, float]:
        sparsity = self.optimizer.sparsity()[0]
        return {
            "penalty": float(self.optimizer.penalty_value()),
            "zero_weights": sparsity.zeros,
            "zero_channels": sparsity.groups or 0.0,
        }

    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}


class Regularized(TrainingExperiment):
    """The experiment of section 8.2."""

    name = "regularized"
    title = "Regularized training (section 8.2)"
    text = "ψ is ℓ∞,1 on the weights of every layer, one group per output channel; the paper has strength 0.1."
    measures = (TRAIN_LOSS, TEST_ACCURACY, PENALTY, OBJECTIVE, ZERO_WEIGHTS, ZERO_CHANNELS)
    paper_lr = 0.1
    paper_best_lr = {64: 0.01, 128: 0.01, 256: 0.1}  # noqa: RUF012
    stands_for = {4: 64, 8: 128, 16: 256}  # noqa: RUF012
    sizes = Presets(
        paper=Size(64, Grid((256, 128, 64), rates=(1.0, 0.1, 0.01), momenta=(0.0, 0.9, 0.99), epochs=300)),
        medium=Size(
            8, Grid((256, 64), rates=(0.1, 0.3), momenta=(0.9, 0.0), epochs=30, annealed=0.1, repeat_all=True), seeds=2
        ),
        quick=Size(8, Grid((256,), rates=(0.3, 0.1, 0.03), momenta=(0.0, 0.9), epochs=10)),
        # 1,437 images in batches of 16 are 89 steps per epoch; batches of 256 would be 5, with hardly any noise
        quick_on_digits=Size(8, Grid((16, 8, 4), rates=(0.1, 0.01), momenta=(0.0, 0.9), epochs=12)),
    )

    def trainer(self, options: Options) -> Callable[[Setting, Images, str], Trainer]:
        return partial(RegularizedTrainer, strength=options.strength)

    def conditions(self, options: Options) -> dict[str, Any]:
        return {**super().conditions(options), "strength": options.strength}

    def arguments(self, options: Options) -> list[str]:
        given = [f"--strength {options.strength:g}"] if options.strength != STRENGTH else []
        return super().arguments(options) + given
