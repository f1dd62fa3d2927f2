"""Every prox on a hundred thousand random inputs: shapes, layouts, dtypes, scales, ties, steps, `out=`, NaN and inf.

By default only a few inputs run for each penalty; `pytest -m slow` runs all of them.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray
from torch import Tensor

import proxmo
from penalties import references as ref
from penalties.cases import CASES, TRIMMED, Case, every_case, objective, tolerance
from proxmo import Penalty

PER_CASE = 3000
FEW = 20

Array = NDArray[np.float64]
MATRIX = (proxmo.Nuclear, proxmo.Rank, proxmo.NuclearBall)

SMALL = [shape for axes in range(4) for shape in itertools.product((1, 2, 3), repeat=axes)]
FOUR_AXES = [(1, 1, 1, 1), (2, 3, 1, 2), (3, 2, 2, 2), (1, 3, 2, 2), (2, 1, 3, 1)]
EMPTY = [(0,), (0, 3), (2, 0), (2, 0, 3), (0, 1, 2, 2)]
MEDIUM = [(16,), (17,), (40,), (5, 7), (2, 33), (33, 2), (4, 3, 6)]
# On both sides of the row length and the number of elements at which the root-finder changes its method.
LONG = [(65536,), (65537,), (2, 32769), (2049, 32), (1986, 33)]


@dataclass(frozen=True)
class Trial:
    """One input, whose entries are drawn from the seed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    scale: float
    """Scale of the penalty's fields."""
    layout: str
    step: float
    step_form: str
    out: str
    bad: float | None
    seed: int


def trials(case: Case) -> st.SearchStrategy[Trial]:
    penalty = case.make(1.0)
    fitting = [shape for shape in SMALL + FOUR_AXES + EMPTY + MEDIUM if len(shape) >= case.axes]
    # References loop over groups in Python: use long tensors only where there are groups, and few of them.
    long = [shape + (1,) * (case.axes - len(shape)) for shape in LONG]
    long = [shape for shape in long if not penalty.separable and len(groups(penalty, torch.empty(shape))) < 2100]
    return st.builds(
        Trial,
        shape=st.sampled_from(fitting + long),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
        kind=st.sampled_from(sorted(KINDS)),
        scale=st.sampled_from([1.0, 1.0, 1e-30, 1e30]),
        layout=st.sampled_from(["contiguous", "transposed", "strided", "expanded", "channels_last"]),
        step=st.sampled_from([0.0, 1e-30, 1e-12, 0.05, 0.5, 1.0, 1.4, 2.5, 30.0, 1e6, 1e30]),
        step_form=st.sampled_from(["number", "float64", "float32"]),
        out=st.sampled_from(["none", "x", "other", "transposed"]),
        bad=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
        seed=st.integers(0, 2**32 - 1),
    )


Random = np.random.Generator
ROUND = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 0.7, 2.0]

KINDS: dict[str, Callable[[Random, tuple[int, ...], torch.finfo], Any]] = {
    "ordinary": lambda r, shape, info: 2 * r.standard_normal(shape),
    "round": lambda r, shape, info: r.choice(ROUND, shape),
    "equal": lambda r, shape, info: np.full(shape, 2 * r.standard_normal()),
    "equal up to sign": lambda r, shape, info: r.choice([-1.3, 1.3], shape),
    "close together": lambda r, shape, info: 3 + info.eps * r.integers(0, 9, shape),
    "mixed magnitudes": lambda r, shape, info: r.standard_normal(shape) * 10.0 ** r.uniform(-30, 30, shape),
    "few large": lambda r, shape, info: np.where(r.random(shape) < 0.2, 1e8, 1.0) * r.standard_normal(shape),
    "huge": lambda r, shape, info: 1e30 * r.standard_normal(shape),
    "tiny": lambda r, shape, info: 1e-30 * r.standard_normal(shape),
    "subnormal": lambda r, shape, info: r.integers(-9, 10, shape) * info.smallest_normal * info.eps,
    "zero": lambda r, shape, info: r.choice([0.0, -0.0], shape),
}


def entries_of(trial: Trial, case: Case) -> Tensor:
    rng = np.random.default_rng([trial.seed, zlib.crc32(case.name.encode())])
    info = torch.finfo(trial.dtype)
    values = np.asarray(KINDS[trial.kind](rng, trial.shape, info), dtype=np.float64)
    if trial.kind in ("ordinary", "round", "equal", "close together"):
        values *= trial.scale
    limit = info.max / 128  # headroom for float16: the nearest matrix of low rank may have larger entries
    return torch.from_numpy(np.asarray(values.clip(-limit, limit))).to(trial.dtype)


def with_layout(x: Tensor, layout: str) -> Tensor:
    """Return ``x`` with other strides; "expanded" repeats the first index of the last axis."""
    if layout == "transposed":
        axes = tuple(reversed(range(x.dim())))
        return x.permute(axes).contiguous().permute(axes)
    if layout == "strided":
        wide = torch.zeros([2 * size for size in x.shape], dtype=x.dtype)[(slice(None, None, 2),) * x.dim()]
        return wide.copy_(x)
    if layout == "expanded" and x.dim() and x.shape[-1]:
        return x[..., :1].expand(x.shape)
    if layout == "channels_last" and x.dim() == 4:
        return x.to(memory_format=torch.channels_last)
    return x.clone()


def step_of(trial: Trial) -> float | Tensor:
    return (
        trial.step if trial.step_form == "number" else torch.tensor(trial.step, dtype=getattr(torch, trial.step_form))
    )


def out_of(trial: Trial, x: Tensor) -> Tensor | None:
    if trial.out == "none":
        return None
    if trial.out == "x" and trial.layout != "expanded":  # torch cannot write to memory shared by several entries
        return x
    return with_layout(
        torch.full(x.shape, math.nan, dtype=x.dtype), "transposed" if trial.out == "transposed" else "contiguous"
    )


def level(y: Array, radius: float) -> Any:
    """Return θ with Σ max(y − max(y) − θ, 0) = radius: the largest of the lower bounds that active sets give."""
    below_top = np.sort(y - y.max())[::-1].astype(np.longdouble)
    return ((np.cumsum(below_top) - radius) / np.arange(1, y.size + 1)).max()


def simplex(y: Array, radius: float) -> Array:
    """Unlike the shared reference, this is accurate even if the radius is negligible beside the entries."""
    return np.maximum(y - y.max() - level(y, radius), 0).astype(np.float64)


def l1_ball(x: Array, radius: float) -> Array:
    return x if math.fsum(np.abs(x)) <= radius else np.sign(x) * simplex(np.abs(x), radius)


def cap(x: Array, amount: float) -> Array:
    """Return the prox of amount·max|x|."""
    if math.fsum(np.abs(x)) <= amount:
        return 0 * x
    top = np.abs(x).max()
    return np.sign(x) * np.minimum(np.abs(x), float(top + level(np.abs(x), amount)))


def top_k(x: Array, k: int) -> Array:
    """Sort instead of trying all supports, which are too many here."""
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    result = np.zeros_like(x)
    result[kept] = x[kept]
    return result


def l_half(penalty: Any, x: Array, step: float) -> Array:
    """Call the shared reference without the smallest numbers: their powers underflow, and their prox is 0 here."""
    return _shared["LHalf"](penalty, np.where(np.abs(x) < 1e-200, 0.0, x), step)


def trimmed(penalty: Any, x: Array, step: float) -> Array:
    """Sort the costs instead of trying all choices."""
    value, shared = next((v, p) for make, _, v, p, _ in TRIMMED if type(make(1.0)) is type(penalty.penalty))
    prox = ROBUST_REFERENCES.get(type(penalty.penalty).__name__, shared)
    return ref.trimmed_prox(value, prox, lambda costs, k: np.argsort(-np.array(costs), kind="stable")[:k])(
        penalty, x, step
    )


_shared = {type(case.make(1.0)).__name__: case.prox for case in CASES}
ROBUST_REFERENCES: dict[str, Callable[[Any, Array, float], Array]] = {
    "Simplex": ref.by_group(lambda p, g, t: simplex(g, p.radius)),
    "L1Ball": ref.by_group(lambda p, g, t: l1_ball(g, p.radius)),
    "GroupLInf": ref.by_group(lambda p, g, t: cap(g, t * p.strength)),
    "TopK": ref.by_group(lambda p, g, t: top_k(g, p.k)),
    "NuclearBall": ref.spectral(lambda p, sigma, t: l1_ball(sigma, p.radius)),
    "LHalf": l_half,
    "Trimmed": trimmed,
}
"""References for any size and number of entries, in place of shared ones that are limited in either."""


def reference(case: Case, penalty: Penalty, x: Tensor, step: float) -> Tensor:
    prox = ROBUST_REFERENCES.get(type(penalty).__name__, case.prox)
    return torch.from_numpy(np.asarray(prox(penalty, x.double().contiguous().numpy(), step)))


def groups(penalty: Penalty, x: Tensor) -> list[Any]:
    """Return the indices of the groups of ``x``, or of all of ``x`` if the penalty has no groups."""
    if isinstance(penalty, MATRIX):
        return [...]
    return list(ref.groups(x.double().numpy(), getattr(penalty, "dim", None)))


def spread(penalty: Penalty, values: Tensor) -> Tensor:
    """Replace each value by the largest of its group."""
    if penalty.separable:
        return values
    dim = None if isinstance(penalty, MATRIX) else getattr(penalty, "dim", None)
    outer = {axis % values.dim() for axis in ((dim,) if isinstance(dim, int) else dim or ())}
    inner = [axis for axis in range(values.dim()) if axis not in outer]
    return values.amax(inner, keepdim=True).expand(values.shape) if inner else values


def check(case: Case, trial: Trial) -> None:
    """Check all properties of one prox."""
    if trial.dtype == torch.float16 and trial.scale != 1:
        trial = replace(trial, scale=1.0)  # the others are out of its range
    penalty = case.make(trial.scale)
    x = with_layout(entries_of(trial, case), trial.layout)
    clean = x.clone()
    bad = torch.zeros(x.shape, dtype=torch.bool)
    if trial.bad is not None and x.numel() and trial.layout != "expanded":
        bad.view(-1)[trial.seed % x.numel()] = True
        x.masked_fill_(bad, trial.bad)
    given_x, step = x.clone(), step_of(trial)
    out = out_of(trial, x)
    result = penalty.prox(x, step, out=out)

    assert out is None or result is out
    assert (result.shape, result.dtype) == (given_x.shape, given_x.dtype)
    if out is not x:
        assert same(x, given_x)
        assert out is not None or result.data_ptr() != x.data_ptr() or not x.numel()
    if float(step) == 0 or not x.numel():
        assert same(result, given_x)
        assert x.numel() or penalty.value(result) == 0
    elif bad.any():
        check_bad_entry(penalty, result, given_x, clean, bad, step)
    else:
        check_prox(case, penalty, result, given_x, float(step))


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are bitwise equal, where all NaN are equal."""
    bits = [t.double().masked_fill(t.isnan(), math.nan).numpy().tobytes() for t in (one, other)]
    return bits[0] == bits[1]


def check_bad_entry(
    penalty: Penalty, result: Tensor, x: Tensor, clean: Tensor, bad: Tensor, step: float | Tensor
) -> None:
    """Check that NaN and inf reach the result, and change only what depends on them."""
    affected = bad if penalty.separable else spread(penalty, bad)
    expected = penalty.prox(clean, step).double()
    size = torch.maximum(clean.double().abs(), expected.abs())
    difference = (result.double() - expected).abs()
    assert (difference <= allowed_error(penalty, size, x.dtype))[~affected].all()
    entry, found = x[bad], result[bad]
    if entry.isnan():
        assert found.isnan()
        assert not penalty.value(result).isfinite() or isinstance(penalty, proxmo.L0)
    elif not found.isnan() and float(step) * max(weights(penalty), default=0.0) < torch.finfo(x.dtype).max:
        # as in the limit of ever larger numbers: a constraint may bound it, other penalties keep it
        limit = penalty.prox(clean.masked_fill(bad, math.copysign(torch.finfo(x.dtype).max, float(entry))), step)[bad]
        bounded = isinstance(penalty, proxmo.Constraint) and limit.abs() < torch.finfo(x.dtype).max
        assert found == (limit if bounded else entry)


def allowed_error(penalty: Penalty, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the promised error: relative to the largest entry of the same group, absolute for subnormal numbers.

    For large matrices it is relative to their norm, as the error of any SVD is, including that of the reference.
    """
    info = torch.finfo(dtype)
    long_matrix = isinstance(penalty, MATRIX) and size.numel() > 1000
    largest = torch.linalg.vector_norm(size).expand(size.shape) if long_matrix else spread(penalty, size)
    return tolerance(dtype) * largest + info.smallest_normal * info.eps


def check_prox(case: Case, penalty: Penalty, result: Tensor, x: Tensor, step: float) -> None:
    """Check the result against the reference, or as another minimizer if ψ is not convex, and the value of ψ there."""
    expected = reference(case, penalty, x, step)
    off = (result.double() - expected).abs() > allowed_error(
        penalty, torch.maximum(x.double().abs(), expected.abs()), x.dtype
    )
    # The squares of such numbers underflow, both in the references and in the singular values.
    too_small = x.double().abs() < 1e-150
    if isinstance(penalty, MATRIX):
        off &= ~too_small.all()
    elif penalty.separable and not isinstance(penalty, proxmo.Constraint):
        off &= ~too_small
        assert (result.abs() <= x.abs())[too_small].all()
    if penalty.convex:
        assert not off.any()
    else:
        for index in groups(penalty, x) if not penalty.separable else off.nonzero().unbind():
            block = tuple(index) if isinstance(index, Tensor) else index
            if off[block].any():
                assert_not_above(case, penalty, result[block], expected[block], x[block], step)
    if isinstance(penalty, proxmo.Constraint):
        # the rank of a matrix with nearly subnormal entries is not well defined
        nearly_subnormal = result.abs().max() < torch.finfo(x.dtype).smallest_normal / torch.finfo(x.dtype).eps
        assert penalty.value(result) == 0 or (isinstance(penalty, proxmo.Rank) and nearly_subnormal)
    else:
        dtype = torch.promote_types(x.dtype, torch.float32)
        info = torch.finfo(dtype)
        # a strength beyond the range of the dtype acts as infinity or zero
        if all(info.smallest_normal < weight < info.max for weight in weights(penalty)):
            value, found = case.value(penalty, result.double().numpy()), float(penalty.value(result))
            near = pytest.approx(value, rel=10 * tolerance(dtype), abs=info.smallest_normal)
            assert found == near or (found == math.inf and value > info.max * (1 - info.eps))
    if not isinstance(penalty, MATRIX):  # these mix the signs of entries
        assert not (result.signbit() & ~x.signbit()).any()
    if x.abs().max() < torch.finfo(x.dtype).smallest_normal or x.numel() > 1000:
        return  # rounding errors are as large as the numbers, or the reference is too slow
    others = []
    if not isinstance(penalty, proxmo.Simplex):  # all other sets contain 0 and the segments from it to their points
        others += [torch.zeros_like(x), 0.9 * result]
    if not isinstance(penalty, proxmo.Constraint):
        others += [x, 0.99 * result + 0.01 * x, result.flatten().flip(0)]
    for other in others:
        assert_not_above(case, penalty, result, other, x, step)


def weights(penalty: Penalty) -> list[float]:
    return [value for value in vars(penalty).values() if isinstance(value, float)]


def assert_not_above(case: Case, penalty: Penalty, result: Tensor, other: Tensor, x: Tensor, step: float) -> None:
    """Assert that ψ(u) + ‖u − x‖²/(2·step) is not larger at ``result`` than at ``other``, up to rounding."""
    reached, possible = (objective(case, penalty, u.reshape(x.shape), x, step) for u in (result, other))
    scale = float(x.double().square().sum()) / step
    assert reached <= possible + 4 * tolerance(x.dtype) * (possible + scale)


def run(case: Case, count: int) -> None:
    """Run ``check`` on at least ``count`` trials."""
    ran = 0

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(trial=trials(case))
    def checked(trial: Trial) -> None:
        nonlocal ran
        ran += 1
        check(case, trial)

    checked()
    assert ran >= count


@every_case
def test_prox_on_a_few_random_inputs(case: Case) -> None:
    run(case, FEW)


@pytest.mark.slow
@every_case
def test_prox_on_many_random_inputs(case: Case) -> None:
    run(case, PER_CASE)


def test_slow_tests_run_a_hundred_thousand_inputs() -> None:
    assert PER_CASE * len(CASES) >= 100_000
