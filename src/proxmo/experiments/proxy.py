"""Proxy training (appendix A): f = ℓ − ℓ̂ and ψ = ℓ̂, with ℓ̂ the loss on a small part of the training images."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from proxmo import InexactProxSGD, InnerSGD, ProxyObjective
from proxmo.experiments.images import Batches, Images
from proxmo.experiments.training import Setting, Trainer

INNER = InnerSGD(steps=20, lr=0.01)
SUBSET_SEED = 0


class ProxyTrainer(Trainer):
    """`InexactProxSGD` on a `ProxyObjective`; an epoch is one pass of ℓ over the training images.

    Args:
        setting, images, device: as for every `Trainer`; ``setting.batch`` is that of ℓ.
        proxy_images: how many training images ℓ̂ has, the same in all runs.
        proxy_batch: mini-batches of ℓ̂.
    """

    def __init__(self, setting: Setting, images: Images, device: str, proxy_images: int, proxy_batch: int) -> None:
        super().__init__(setting, images, device)
        if 2 * proxy_images > len(images.train):
            raise ValueError(f"proxy_images must be at most half of the {len(images.train)} images, got {proxy_images}")
        chosen = torch.randperm(len(images.train), generator=torch.Generator().manual_seed(SUBSET_SEED))[:proxy_images]
        self.proxy_batches = Batches(images, proxy_batch, self.generator, only=chosen, device=device)
        self.optimizer = InexactProxSGD(self.network.parameters(), setting.lr, setting.momentum, inner=INNER)

    def train_epoch(self) -> float:
        # new loaders in each epoch, so that the state of the generator says all about where they are
        objective = ProxyObjective(self.model, functional.cross_entropy, self.batches, self.proxy_batches)
        total = 0.0
        for _ in range(len(self.batches)):
            self.optimizer.step(objective.loss_closure, objective.psi_closure)
            total += objective.loss_value
        return total / len(self.batches)

    def measures(self) -> dict[str, float]:
        return {"penalty": 0.0, "zero_weights": 0.0, "zero_channels": 0.0}

    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}
