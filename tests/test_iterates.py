"""RandomIterate: the distribution of the draw, its seed, resuming, evaluation, and equal draws on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from torch import distributed

import proxmo
from proxmo import theory
from scale import processes


def kept_index(weights: list[float], generator: torch.Generator | None = None) -> int:
    x = torch.zeros(1)
    kept = proxmo.RandomIterate([x], generator)
    for k, weight in enumerate(weights, start=1):
        x.fill_(k)
        kept.update(weight)
    with kept.swapped_in():
        assert int(x) == kept.index
    return kept.index


@pytest.mark.parametrize("kind", ["uniform", "inverse M"])
def test_iterates_are_drawn_in_proportion_to_their_weights(kind: str) -> None:
    schedule = theory.IncreasingSchedule(smoothness=1.0, noise_variance=25.0, phi0=1.0)
    weights = [1.0] * 8 if kind == "uniform" else [schedule.weight(i) for i in range(1, 9)]
    counts = [0] * 8
    for seed in range(4000):
        counts[kept_index(weights, torch.Generator().manual_seed(seed)) - 1] += 1
    expected = [4000 * w / sum(weights) for w in weights]
    assert chisquare(counts, expected).pvalue > 1e-3
    if kind != "uniform":
        assert chisquare(counts).pvalue < 1e-6  # the sample is large enough to tell the two distributions apart


def test_first_iterate_is_kept_until_the_second() -> None:
    assert kept_index([0.3], torch.Generator().manual_seed(5)) == 1


def index_under(seed: int, steps: int = 50) -> int:
    torch.manual_seed(seed)
    return kept_index([1.0] * steps)


@pytest.fixture
def _restored_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.usefixtures("_restored_seed")
def test_default_draws_follow_the_seed_of_torch() -> None:
    indices = [index_under(seed) for seed in range(20)]
    assert len(set(indices)) > 10
    assert [index_under(seed) for seed in range(20)] == indices


@pytest.mark.usefixtures("_restored_seed")
def test_every_iterate_is_kept_equally_often_over_seeds_of_torch() -> None:
    counts = [0] * 8
    for seed in range(2000):
        counts[index_under(seed, steps=8) - 1] += 1
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.usefixtures("_restored_seed")
def test_default_draws_leave_torch_s_generator_alone_and_are_unrelated_to_it() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    kept = proxmo.RandomIterate([torch.zeros(1)])
    assert not torch.equal(kept.state_dict()["generator"], state)
    kept.update()
    assert torch.equal(torch.get_rng_state(), state)


def index_of_rank_under_own_seed() -> tuple[int, int]:
    seed = 3 + distributed.get_rank()
    return torch.manual_seed(seed).initial_seed(), kept_index([1.0] * 1000)


@pytest.mark.usefixtures("_restored_seed")
def test_ranks_with_different_seeds_keep_the_iterate_of_rank_0(tmp_path: Path) -> None:
    expected, other = index_under(3, steps=1000), index_under(4, steps=1000)
    assert expected != other
    assert processes.run(index_of_rank_under_own_seed, 2, tmp_path) == [(3, expected), (4, expected)]


def test_swapped_in_restores_the_parameters() -> None:
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


def test_resumed_run_draws_the_same(tmp_path: Path) -> None:
    def run(x: torch.Tensor, kept: proxmo.RandomIterate, steps: range) -> None:
        for k in steps:
            x.fill_(k)
            kept.update()

    for seed in range(20):
        x, y = torch.zeros(1), torch.zeros(1)
        uninterrupted = proxmo.RandomIterate([x], torch.Generator().manual_seed(seed))
        run(x, uninterrupted, range(1, 31))
        interrupted = proxmo.RandomIterate([y], torch.Generator().manual_seed(seed))
        run(y, interrupted, range(1, 11))
        torch.save(interrupted.state_dict(), tmp_path / "state.pt")
        resumed = proxmo.RandomIterate([y])
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        run(y, resumed, range(11, 31))
        assert resumed.index == uninterrupted.index
        with uninterrupted.swapped_in(), resumed.swapped_in():
            assert torch.equal(x, y)


@pytest.mark.usefixtures("_restored_seed")
def test_default_draws_do_not_depend_on_random_numbers_used_elsewhere() -> None:
    torch.manual_seed(0)
    iterates = []
    for _ in range(3):
        torch.rand(5)
        iterates.append(proxmo.RandomIterate([torch.zeros(2)]))
    for _ in range(100):
        for iterate in iterates:
            torch.rand(5)
            iterate.update()
    assert len({iterate.index for iterate in iterates}) == 1
    assert iterates[0].index > 1


def test_invalid_arguments_are_refused() -> None:
    kept = proxmo.RandomIterate([torch.zeros(2)])
    with pytest.raises(ValueError, match="weight must be a finite number > 0, got 0"):
        kept.update(0)
    state = kept.state_dict()
    with pytest.raises(ValueError, match=r"state must hold tensors of shapes \[\(3,\)\], got \[\(2,\)\]"):
        proxmo.RandomIterate([torch.zeros(3)]).load_state_dict(state)
