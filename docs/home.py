"""Draw the picture of the home page and the README: `python docs/home.py`."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import proxmo

STEPS = 1000
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
penalty = proxmo.Trimmed(proxmo.GroupL2(0.0, dim=1), keep=1.0)
groups = [{"params": [model[0].weight], "penalty": penalty}, {"params": [model[0].bias, *model[2].parameters()]}]
optimizer = proxmo.ProxSGD(groups, lr=0.5)
rates = proxmo.RateScheduler(optimizer, proxmo.CosineRates(lr=0.5, momentum=0.9, horizon=STEPS))
target = proxmo.KeepScheduler(optimizer, keep=8 / 64, horizon=STEPS)
norms = []
for batch in torch.randint(len(labels), (STEPS, 64)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
    optimizer.step()
    rates.step()
    target.step()
    norms.append(model[0].weight.detach().norm(dim=0).numpy())

curves = np.array(norms)
curves[1:][(curves[1:] == 0) & (curves[:-1] == 0)] = np.nan  # a curve ends where it reaches zero
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(2.4, 1), layout="constrained")
alive = np.array(norms[-1]) > 0
left.plot(curves[:, ~alive], color="0.75", linewidth=0.8)
left.plot(curves[:, alive], color="#0072B2", linewidth=1.6)
left.set(xlabel="step", ylabel="norm of the weights of a pixel", xlim=(0, STEPS), ylim=(0, None))
left.spines[["top", "right"]].set_visible(False)
right.imshow(inputs[targets == 3].mean(0).reshape(8, 8), cmap="Greys", alpha=0.6)
for pixel in np.flatnonzero(alive):
    square = plt.Rectangle((pixel % 8 - 0.5, pixel // 8 - 0.5), 1, 1, fill=False, edgecolor="#0072B2", linewidth=3)
    right.add_patch(square)
right.axis("off")
right.set_title("the eight pixels that are left", fontsize=10)
figure.savefig(Path(__file__).with_name("home.png"), dpi=110)
