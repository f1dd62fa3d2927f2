"""
Discover the Lorenz equations from data
=======================================

Sparse identification of dynamics (SINDy) writes the derivative of a trajectory as a combination of a few terms from a
library. Here the library has all monomials of x, y and z up to degree two: 10 for each of three equations. The Lorenz
system contains seven of these 30 terms.

*What proxmo adds*: you set the number of terms instead of a threshold, and you can use any loss, such as a Huber loss
that tolerates bad measurements. *The usual tool*: pysindy, which repeatedly thresholds a least-squares fit (STLSQ).
"""

# %%
# The data: a hundred short trajectories from random starting points and their derivatives, with a little noise on all
# derivatives and gross errors on one in twenty.

import matplotlib.pyplot as plt
import numpy as np
import pysindy
import torch
from scipy.integrate import solve_ivp

import proxmo


def lorenz(_, state):
    x, y, z = state
    return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]


random = np.random.default_rng(0)
starts = random.uniform(-30, 30, (100, 3))
times = np.linspace(0, 0.1, 10)
states = np.concatenate([solve_ivp(lorenz, (0, 0.1), start, t_eval=times).y.T for start in starts])
exact = np.array([lorenz(0, state) for state in states])
clean = exact + random.normal(0, 5, exact.shape)
corrupted = np.where(random.random((len(states), 1)) < 0.05, clean + random.normal(0, 3000, exact.shape), clean)

library = pysindy.PolynomialLibrary(degree=2)
terms = np.asarray(library.fit_transform(states))
names = library.get_feature_names(["x", "y", "z"])
truth = np.zeros((10, 3))
truth[names.index("x")] = [-10, 28, 0]
truth[names.index("y")] = [10, -1, 0]
truth[names.index("z"), 2] = -8 / 3
truth[names.index("x y"), 2] = 1
truth[names.index("x z"), 1] = -1

# %%
# proxmo: a linear layer on the terms, scaled to equal size, with a trimmed ℓ1 penalty that leaves seven coefficients
# alone. ``KeepScheduler`` lowers their number from 30 to 7 during training.


def discover(derivatives: np.ndarray, loss: torch.nn.Module, keep: float = 7 / 30) -> np.ndarray:
    scale = np.sqrt((terms**2).mean(0))
    inputs = torch.tensor(terms / scale, dtype=torch.float32)
    size = np.median(np.abs(derivatives), axis=0)
    targets = torch.tensor(derivatives / size, dtype=torch.float32)
    coefficients = torch.nn.Parameter(torch.zeros(10, 3))
    optimizer = proxmo.ProxSGD([coefficients], lr=0.2, momentum=0.9, penalty=proxmo.Trimmed(proxmo.L1(0.0), keep=1.0))
    target = proxmo.KeepScheduler(optimizer, keep=keep, horizon=2000)
    for _ in range(2000):
        optimizer.zero_grad()
        loss(inputs @ coefficients, targets).backward()
        optimizer.step()
        target.step()
    return coefficients.detach().numpy() / scale[:, None] * size


def with_pysindy(derivatives: np.ndarray) -> np.ndarray:
    model = pysindy.SINDy(optimizer=pysindy.STLSQ(threshold=0.5), feature_library=library)
    model.fit(states, t=0.01, x_dot=derivatives)
    return model.coefficients().T


squared, huber = torch.nn.MSELoss(), torch.nn.HuberLoss(delta=0.3)
found = {
    "pysindy, clean": with_pysindy(clean),
    "proxmo, clean": discover(clean, squared),
    "pysindy, corrupted": with_pysindy(corrupted),
    "proxmo with Huber, corrupted": discover(corrupted, huber),
}
for way, coefficients in found.items():
    right = int(((coefficients != 0) & (truth != 0)).sum())
    wrong = int(((coefficients != 0) & (truth == 0)).sum())
    print(f"{way:30s} {right} of 7 terms, {wrong} others, largest error {np.abs(coefficients - truth).max():.3f}")

# %%
# On clean data, both find the equations. pysindy takes milliseconds, but you have to know a good threshold: 0.5 is well
# below the smallest coefficient, 1. On corrupted data, least squares keeps terms that are not in the system. (pysindy
# could bag over subsets or smooth first; here both get the raw data.) Many starting points are important: along one
# long trajectory the terms are nearly collinear, and the trimmed penalty found only five or six of the seven.

figure, axes = plt.subplots(1, 4, figsize=(11, 4), layout="constrained", sharey=True)
for ax, (way, coefficients) in zip(axes, found.items(), strict=True):
    shown = np.where(coefficients == 0, np.nan, np.abs(coefficients))
    image = ax.imshow(np.log10(shown), aspect="auto", cmap="viridis", vmin=-2, vmax=1.5)
    for row, column in np.argwhere(truth != 0):
        ax.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="tab:red", linewidth=2))
    ax.set_xticks(range(3), ["dx", "dy", "dz"])
    ax.set_yticks(range(10), names)
    ax.set_title(way, fontsize=10)
figure.colorbar(image, ax=axes, label="log₁₀ |coefficient|; framed: true terms", shrink=0.8)
plt.show()
