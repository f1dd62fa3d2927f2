"""RandomIterate: the law of the draw, resuming, evaluation, and the same draw everywhere."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy.stats import chisquare

import proxmo
from proxmo import theory


def drawn(weights: list[float], seed: int) -> int:
    x = torch.zeros(1)
    kept = proxmo.RandomIterate([x], torch.Generator().manual_seed(seed))
    for k, weight in enumerate(weights, start=1):
        x.fill_(k)
        kept.update(weight)
    with kept.swapped_in():
        assert int(x) == kept.index
    return kept.index


@pytest.mark.parametrize("kind", ["uniform", "inverse M"])
def test_the_law_of_the_draw(kind: str) -> None:
    schedule = theory.IncreasingSchedule(smoothness=1.0, noise_variance=25.0, phi0=1.0)
    weights = [1.0] * 8 if kind == "uniform" else [schedule.weight(i) for i in range(1, 9)]
    counts = [0] * 8
    for seed in range(4000):
        counts[drawn(weights, seed) - 1] += 1
    expected = [4000 * w / sum(weights) for w in weights]
    assert chisquare(counts, expected).pvalue > 1e-3
    if kind != "uniform":
        assert chisquare(counts).pvalue < 1e-6  # and the test tells the laws apart


def test_the_first_iterate_is_always_kept_at_first() -> None:
    assert drawn([0.3], seed=5) == 1


def test_evaluation_puts_everything_back() -> None:
    net = torch.nn.Linear(3, 2)
    kept = proxmo.RandomIterate(net.parameters())
    start = copy.deepcopy(net)
    with torch.no_grad():
        net.weight.add_(1)
    with kept.swapped_in():
        assert torch.equal(net.weight, start.weight)
    assert torch.equal(net.weight, start.weight + 1)

    def fail() -> None:
        with kept.swapped_in():
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.equal(net.weight, start.weight + 1)
    other = torch.nn.Linear(3, 2)
    kept.copy_to(other.parameters())
    assert torch.equal(other.weight, start.weight)
    with pytest.raises(ValueError, match="params must have the shapes"):
        kept.copy_to(torch.nn.Linear(4, 2).parameters())


def test_a_resumed_run_draws_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def run(x: torch.Tensor, kept: proxmo.RandomIterate, steps: range) -> None:
        for k in steps:
            x.fill_(k)
            kept.update()

    for seed in range(20):
        x, y = torch.zeros(1), torch.zeros(1)
        straight = proxmo.RandomIterate([x], torch.Generator().manual_seed(seed))
        run(x, straight, range(1, 31))
        broken = proxmo.RandomIterate([y], torch.Generator().manual_seed(seed))
        run(y, broken, range(1, 11))
        torch.save(broken.state_dict(), tmp_path / "state.pt")
        resumed = proxmo.RandomIterate([y])
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        run(y, resumed, range(11, 31))
        assert resumed.index == straight.index
        with straight.swapped_in(), resumed.swapped_in():
            assert torch.equal(x, y)


def test_processes_with_different_data_keep_the_same_iterate() -> None:
    ranks = [proxmo.RandomIterate([torch.zeros(2)]) for _ in range(3)]
    for _ in range(100):
        torch.rand(5)  # each rank uses the global generator in its own way
        for rank in ranks:
            rank.update()
    assert len({rank.index for rank in ranks}) == 1
    assert ranks[0].index > 1


def test_bad_calls() -> None:
    kept = proxmo.RandomIterate([torch.zeros(2)])
    with pytest.raises(ValueError, match="weight must be a finite number > 0, got 0"):
        kept.update(0)
    state = kept.state_dict()
    with pytest.raises(ValueError, match=r"state must hold tensors of shapes \[\(3,\)\], got \[\(2,\)\]"):
        proxmo.RandomIterate([torch.zeros(3)]).load_state_dict(state)
