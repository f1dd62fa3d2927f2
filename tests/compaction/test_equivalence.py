"""Cuts are proven by the labels of both models, so that numbers in the example do not matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from proxmo import GroupL2, compact, unit_groups

EQUAL_TOKENS = torch.full((2, 10), 3)


class Tokens(nn.Module):
    """Embeds tokens, of which the example has one only, with positive numbers: a ReLU does not show there."""

    def __init__(self, between: Callable[[Tokens, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last, self.between = nn.Embedding(10, 8), nn.Linear(8, 2), between
        with torch.no_grad():
            self.embedding.weight[3].abs_()
            self.embedding.weight[:, 1] = 0

    @property
    def width(self) -> int:
        return self.embedding.weight.shape[1]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.between(self, tokens))  # type: ignore[no-any-return]


def rectify_half(model: Tokens, tokens: Tensor) -> Tensor:
    hidden = model.embedding(tokens)
    return torch.cat([hidden[..., :4].relu(), hidden[..., 4:]], -1)


def branch_on_width(model: Tokens, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.embedding(tokens)
    return hidden.relu() if model.width > 7 else hidden


def take_tokens_by_width(model: Tokens, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.embedding(tokens[:, model.width - 4 : model.width])
    return hidden


def number_by_width(model: Tokens, tokens: Tensor) -> Tensor:
    return model.embedding(tokens).clamp(-1.0 if model.width > 7 else 0.0, 5.0)  # type: ignore[no-any-return]


def constant_by_width(model: Tokens, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.embedding(tokens)
    return hidden * (hidden > torch.tensor(-1.0 if model.width > 7 else 0.0))


def flip_by_width(model: Tokens, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.embedding(tokens)
    return hidden if model.width > 7 else hidden.flip(1)


def other_operand_by_width(model: Tokens, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.embedding(tokens)
    return hidden * (hidden.relu() if model.width > 7 else hidden)


def other_part_by_width(model: Tokens, tokens: Tensor) -> Tensor:
    parts: tuple[Tensor, ...] = model.embedding(tokens).split(1, 1)
    return parts[0] if model.width > 7 else parts[1]


def single_channel(model: Tokens, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.embedding(tokens)
    return hidden * (hidden[..., 2:3] > -1)


CASES = [
    *(rectify_half, branch_on_width, take_tokens_by_width, number_by_width, constant_by_width),
    *(flip_by_width, other_operand_by_width, other_part_by_width, single_channel),
]


@pytest.mark.parametrize("between", CASES)
def test_cuts_that_only_the_example_hides_are_refused(between: Callable[[Tokens, Tensor], Tensor]) -> None:
    model = Tokens(between).eval()
    small, report = compact(model, EQUAL_TOKENS)
    tokens = torch.randint(10, (5, 10), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(small(tokens), model(tokens))
    assert small.embedding.embedding_dim == 8
    assert any("of the pruned model" in note or "the pruned model computes" in note for note in report.kept), report
    groups = unit_groups(model, EQUAL_TOKENS, GroupL2(0.1))
    assert not any("units" in group for group in groups)


def shift(model: Tokens, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.embedding(tokens)
    new = torch.zeros(len(tokens), tokens.shape[1], model.width)
    new[:, 1:] = hidden[:, :-1]
    return torch.cat([new, hidden.relu()], 1) + new.new_ones(model.width)


def test_what_does_not_depend_on_the_width_is_cut_whatever_the_example_says() -> None:
    model = Tokens(shift).eval()
    with torch.no_grad():
        model.last.weight[:, 1] = 0
    small, _ = compact(model, EQUAL_TOKENS)
    tokens = torch.randint(10, (5, 10), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(small(tokens), model(tokens))
    assert small.embedding.embedding_dim == 7
