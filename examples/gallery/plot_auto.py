"""
No learning rate: AutoProxSGD against a grid
============================================

``AutoProxSGD`` needs no lr and no momentum. This script compares it with a grid of 20 pairs of lr and momentum, on a
sparse logistic regression whose optimum is known.

*What proxmo adds*: a stochastic proximal method that finds its own step size and still ends with exact zeros. *The
usual tools*: a grid search with ``ProxSGD``, or scikit-learn's ``SGDClassifier`` with its step-size rules.
"""

# %%
# The problem: breast cancer data with 30 standardised features, and ℓ1 with strength 0.01. scikit-learn's exact solver
# gives the optimum F*.

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.preprocessing import StandardScaler

import proxmo

STRENGTH, STEPS, BATCH = 0.01, 1000, 16
features, labels = load_breast_cancer(return_X_y=True)
features = StandardScaler().fit_transform(features)
X, y = torch.tensor(features, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)


def objective(weights: np.ndarray, bias: float) -> float:
    scores = (features @ weights + bias) * (2 * labels - 1)
    return np.logaddexp(0, -scores).mean() + STRENGTH * np.abs(weights).sum()


exact = LogisticRegression(l1_ratio=1.0, C=1 / (STRENGTH * len(y)), solver="saga", tol=1e-6, max_iter=20_000)
exact.fit(features, labels)
optimum = objective(exact.coef_[0], exact.intercept_[0])
print(f"F* = {optimum:.5f} with {np.count_nonzero(exact.coef_)} of 30 features")

# %%
# One run of a proxmo optimizer: 1,000 mini-batches of 16. The function returns the gap F − F* and the number of
# features in use.


def run(make_optimizer, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(30, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = make_optimizer(proxmo.param_groups(model, proxmo.L1(STRENGTH)))
    for batch in torch.randint(len(y), (STEPS, BATCH)):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(X[batch]).squeeze(1), y[batch]).backward()
        optimizer.step()
    weights = model.weight.detach().numpy()[0].astype(float)
    return objective(weights, model.bias.item()) - optimum, int(np.count_nonzero(weights))


# %%
# The grid, and three seeds of ``AutoProxSGD``:

rates, momenta = [0.01, 0.1, 0.3, 1.0, 10.0], [0.0, 0.9, 0.97, 0.99]
grid = np.array([[run(lambda groups: proxmo.ProxSGD(groups, lr, m))[0] for m in momenta] for lr in rates])  # noqa: B023
auto = [run(proxmo.AutoProxSGD, seed) for seed in range(3)]
print("AutoProxSGD: gap", ", ".join(f"{gap:.4f}" for gap, _ in auto), "features", [used for _, used in auto])

# %%
# scikit-learn's SGD with an ℓ1 penalty, on the same number of samples:

passes = STEPS * BATCH // len(y)
for rule in ("optimal", "adaptive"):
    model = SGDClassifier(
        "log_loss",
        penalty="l1",
        alpha=STRENGTH,
        learning_rate=rule,
        eta0=0.01,
        max_iter=passes,
        tol=None,
        random_state=0,
    )
    model.fit(features, labels)
    gap = objective(model.coef_[0], model.intercept_[0]) - optimum
    print(f"SGDClassifier, {rule}: gap {gap:.4f}, features {np.count_nonzero(model.coef_)}")

# %%
# Four of the 20 cells are about as good as ``AutoProxSGD`` or better, and some are worse by orders of magnitude. After
# so few steps, all of them use more features than the optimum. The ``"optimal"`` rule of ``SGDClassifier``, which is
# designed for linear models, is better than both and takes milliseconds: for a linear model, use scikit-learn. Use
# ``AutoProxSGD`` for anything else that torch can differentiate, with any penalty.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
image = left.imshow(np.log10(np.maximum(grid, 1e-5)), cmap="viridis_r", origin="lower")
left.set(xlabel="momentum", ylabel="lr", title="log₁₀(F − F*) of ProxSGD")
left.set_xticks(range(len(momenta)), momenta)
left.set_yticks(range(len(rates)), rates)
figure.colorbar(image, ax=left)
right.plot(np.sort(grid.ravel()), np.arange(1, grid.size + 1), "o-", label="cells of the grid, sorted")
for number, (gap, _) in enumerate(auto):
    right.axvline(gap, color="tab:red", label="AutoProxSGD, three seeds" if number == 0 else None)
right.set(xscale="log", xlabel="F − F* after 1,000 steps", ylabel="cells that are at least as good")
right.legend()
plt.show()
