"""Proxy training (appendix A): f = ℓ − ℓ̂ and ψ = ℓ̂, where ℓ̂ is the loss on a small subset of the training images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from proxmo import InexactProxSGD, InnerSGD, ProxyObjective
from proxmo.experiments.comparison import TrainingExperiment
from proxmo.experiments.data import DataError, load
from proxmo.experiments.experiment import Options
from proxmo.experiments.images import Batches, Images
from proxmo.experiments.presets import Grid, Presets, Size
from proxmo.experiments.training import Setting, Trainer

INNER = InnerSGD(steps=20, lr=0.01)
SUBSET_SEED = 0


class ProxyTrainer(Trainer):
    """`InexactProxSGD` on a `ProxyObjective`; an epoch is one pass of ℓ over the training images.

    Args:
        setting, images, device: as for every `Trainer`; ``setting.batch`` is the batch size of ℓ.
        proxy_images: the number of training images in ℓ̂, the same ones in all runs.
        proxy_batch: the batch size of ℓ̂.
    """

    def __init__(self, setting: Setting, images: Images, device: str, proxy_images: int, proxy_batch: int) -> None:
        super().__init__(setting, images, device)
        if 2 * proxy_images > len(images.train):
            raise ValueError(f"proxy_images must be at most half of the {len(images.train)} images, got {proxy_images}")
        chosen = torch.randperm(len(images.train), generator=torch.Generator().manual_seed(SUBSET_SEED))[:proxy_images]
        self.proxy_batches = Batches(images, proxy_batch, self.generator, only=chosen, device=device)
        self.optimizer = InexactProxSGD(self.network.parameters(), setting.lr, setting.momentum, inner=INNER)

    def train_epoch(self) -> float:
        # A new objective each epoch restarts the loaders, so that the generator's state is all there is to checkpoint.
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


@dataclass(frozen=True)
class Subset:
    """The images of ℓ̂: how many, and how many per batch."""

    images: int
    batch: int


class Proxy(TrainingExperiment):
    """The experiment of appendix A."""

    name = "proxy"
    title = "Proxy training (appendix A)"
    text = (
        "f = ℓ − ℓ̂ and ψ = ℓ̂, the loss on a small subset of the training images; "
        f"{INNER.steps} inner SGD steps with lr {INNER.lr:g}."
    )
    sizes = Presets(
        paper=Size(64, Grid((512,), rates=(1.0, 0.1, 0.01), momenta=(0.0, 0.9, 0.99), epochs=30)),
        medium=Size(8, Grid((512,), rates=(1.0, 0.1), momenta=(0.0, 0.9), epochs=10)),
        quick=Size(8, Grid((512,), rates=(1.0, 0.1), momenta=(0.0, 0.9), epochs=3)),
        quick_on_digits=Size(8, Grid((256,), rates=(1.0, 0.1, 0.01), momenta=(0.0, 0.9), epochs=8)),
    )
    subsets = Presets(
        paper=Subset(2560, 128), medium=Subset(2560, 128), quick=Subset(2560, 128), quick_on_digits=Subset(256, 64)
    )

    def subset(self, options: Options) -> Subset:
        """Return the size of ℓ̂."""
        return self.subsets.choose(options.preset, options.data)

    def check(self, options: Options) -> None:
        proxy_images, available = self.subset(options).images, len(load(options.data, options.root).train)
        if 2 * proxy_images > available:
            raise DataError(
                f"proxy training with preset {options.preset} uses {proxy_images} images as proxy, which must be at "
                f"most half of the training images; {options.data} has {available}: use --data cifar10"
            )

    def conditions(self, options: Options) -> dict[str, Any]:
        subset = self.subset(options)
        return {**super().conditions(options), "proxy": f"{subset.images} images, batch {subset.batch}"}

    def trainer(self, options: Options) -> Callable[[Setting, Images, str], Trainer]:
        subset = self.subset(options)
        return partial(ProxyTrainer, proxy_images=subset.images, proxy_batch=subset.batch)
