"""New memory for large results and averages: what it looks like, and that the system was asked for huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import proxmo
from proxmo.memory import HUGE, empty_like

LARGE = HUGE // 4  # elements of float32
CASES = {
    "a small one": torch.zeros(3, 5),
    "of no elements": torch.zeros(0, 5),
    "a number": torch.zeros(()),
    "a large one": torch.zeros(LARGE // 8, 8),
    "turned": torch.zeros(LARGE // 8, 8).t(),
    "in half precision": torch.zeros(2 * LARGE, dtype=torch.bfloat16),
    "channels last": torch.zeros(16, 64, 32, LARGE // 2**15).to(memory_format=torch.channels_last),
    "with gaps": torch.zeros(LARGE // 4, 8)[:, ::2],
    "the same number again": torch.zeros(()).expand(LARGE),
    "on no device": torch.zeros(LARGE, device="meta"),
}


@pytest.mark.parametrize("x", CASES.values(), ids=CASES)
def test_it_is_laid_out_as_by_torch(x: Tensor) -> None:
    found, expected = empty_like(x), torch.empty_like(x)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert (found.dtype, found.device) == (expected.dtype, expected.device)
    assert empty_like(x, torch.float64).dtype == torch.float64
    assert found._base is None
    assert not found.requires_grad


def test_tensors_that_stand_for_others() -> None:
    with FakeTensorMode() as mode:
        assert isinstance(empty_like(mode.from_tensor(CASES["a large one"])), type(mode.from_tensor(torch.zeros(1))))


def asked_for_huge_pages(x: Tensor) -> bool:
    """Whether the system marks the memory in the middle of the tensor so."""
    middle, inside = x.data_ptr() + x.numel() * x.element_size() // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            inside = start <= middle < end
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the memory of the tensor is not listed")


with_huge_pages = pytest.mark.skipif(
    not (hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists()),
    reason="the system has no huge pages to ask for",
)


@with_huge_pages
@pytest.mark.parametrize("fused", [False, True])
def test_results_of_large_tensors_are_in_huge_pages(fused: bool) -> None:
    x = torch.randn(16 * LARGE)  # memory of this size comes from the system, and was nobody's before
    assert not asked_for_huge_pages(x)
    result = proxmo.L1(0.5).prox(x, step=1.0, fused=fused)
    assert asked_for_huge_pages(result)
    torch.testing.assert_close(result, torch.nn.functional.softshrink(x, 0.5))


@with_huge_pages
@pytest.mark.parametrize("initial", ["gradient", "zero"])
@pytest.mark.parametrize("momentum_dtype", [None, torch.float64])
def test_averages_of_large_tensors_are_in_huge_pages(
    initial: Literal["gradient", "zero"], momentum_dtype: torch.dtype | None
) -> None:
    x = torch.zeros(16 * LARGE)
    x.grad = torch.randn(16 * LARGE)
    optimizer = proxmo.ProxSGD([x], initial=initial, momentum_dtype=momentum_dtype)
    optimizer.step()
    average = optimizer.state[x]["momentum_buffer"]
    assert asked_for_huge_pages(average)
    assert average.dtype == (momentum_dtype or torch.float32)
    torch.testing.assert_close(average.float(), x.grad if initial == "gradient" else torch.zeros_like(x))
