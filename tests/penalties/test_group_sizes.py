"""`for_larger_groups` is as strong on groups of many elements as the penalty is on groups of few."""

import pytest
import torch

import proxmo
from proxmo.penalties.kinds import Grouped


@pytest.mark.parametrize(
    "penalty",
    [proxmo.GroupL2(0.3), proxmo.GroupLInf(0.3), proxmo.SparseGroup(0.1, 0.2)],
    ids=lambda p: type(p).__name__,
)
@pytest.mark.parametrize("times", [1, 4, 25])
def test_prox_of_repeated_groups_is_the_repeated_prox(penalty: Grouped, times: int) -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    once = penalty.prox(x, 2.0)
    assert 0 < int((once == 0).all(1).sum()) < 50
    repeated = penalty.for_larger_groups(times).prox(x.repeat(1, times), 2.0)
    torch.testing.assert_close(repeated, once.repeat(1, times))


def test_strengths_are_rounded_unless_they_stay() -> None:
    assert proxmo.GroupL2(0.123456).for_larger_groups(1) == proxmo.GroupL2(0.123456)
    assert proxmo.GroupL2(0.1).for_larger_groups(48) == proxmo.GroupL2(0.6928)
    assert proxmo.SparseGroup(0.123456, 0.1).for_larger_groups(48) == proxmo.SparseGroup(0.123456, 0.6928)


def test_constraints_are_the_same_for_groups_of_all_sizes() -> None:
    penalty = proxmo.L2Ball(1.0, dim=0)
    assert penalty.for_larger_groups(48) is penalty
