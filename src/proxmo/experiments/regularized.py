"""Regularized training (section 8.2): ResNet-18 with ℓ∞,1 on the weights of every layer, momentum against vanilla."""

from __future__ import annotations

from typing import Any

from torch.nn import functional
from torch.optim.lr_scheduler import MultiStepLR

from proxmo import GroupLInf, ProxSGD
from proxmo.experiments.images import Images
from proxmo.experiments.training import Setting, Trainer

STRENGTH = 0.1
MILESTONES = (150 / 300, 250 / 300)  # where lr falls to a tenth, as shares of the epochs


class RegularizedTrainer(Trainer):
    """`ProxSGD`: weights of convolutions and of the head have one group per output channel, the rest has no penalty.

    >>> from proxmo.experiments import data
    >>> setting = Setting(lr=0.1, momentum=0.9, batch=256, epochs=2, width=8, seed=0)
    >>> trainer = RegularizedTrainer(setting, data.load("digits"), "cpu")
    >>> 0 < trainer.train_epoch() < 10
    True
    """

    def __init__(self, setting: Setting, images: Images, device: str) -> None:
        super().__init__(setting, images, device)
        weights = [p for p in self.network.parameters() if p.dim() > 1]
        others = [p for p in self.network.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": weights, "penalty": GroupLInf(STRENGTH, dim=0)}, {"params": others}]
        self.optimizer = ProxSGD(groups, setting.lr, setting.momentum)
        milestones = [round(share * setting.epochs) for share in MILESTONES]
        self.scheduler = MultiStepLR(self.optimizer, milestones, gamma=0.1)

    def train_epoch(self) -> float:
        total = 0.0
        for inputs, labels in self.batches:
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            total += float(loss.detach())
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
