"""Every penalty on a tensor sharded over four ranks, in every layout, equals the penalty on the whole tensor."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.communication import Message, Messages, compare
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import proxmo
from penalties.cases import CASES, Case, noise
from proxmo import Penalty
from proxmo.penalties.kinds import Grouped
from scale import processes

Layout = tuple[tuple[int, ...], list[Placement]]
LAYOUTS: list[Layout] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Replicate()]),
    ((2, 2), [Replicate(), Shard(1)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)]),
]
# even; uneven; with empty shards; with three axes; long enough that the root-finder takes several passes
SHAPES = [(8, 4), (5, 3), (2, 9), (4, 3, 5), (6, 1500)]
Pairs = list[tuple[tuple[int, ...], Layout]]
ALL_PAIRS: Pairs = list(itertools.product(SHAPES, LAYOUTS))
# every layout once and every shape at least once: each message between four processes takes milliseconds
SHAPE_OF_LAYOUT = [(4, 3, 5), (6, 1500), (8, 4), (5, 3), (4, 3, 5), (4, 3, 5), (5, 3), (2, 9)]
PAIRS: Pairs = list(zip(SHAPE_OF_LAYOUT, LAYOUTS, strict=True))


def pairs_for(case: Case, pairs: Pairs) -> Pairs:
    """Return the pairs with another shape where the penalty needs more axes."""
    return [(shape if len(shape) >= case.axes else (4, 3, 5), layout) for shape, layout in pairs]


class Found(NamedTuple):
    """Results of a penalty on a sharded tensor, gathered, and the messages of its prox."""

    prox: Tensor
    value: Tensor
    zero_groups: tuple[int, int] | None
    keeps_layout: bool
    sent: list[Message]


def meshes() -> dict[tuple[int, ...], DeviceMesh]:
    return {(4,): init_device_mesh("cpu", (4,)), (2, 2): init_device_mesh("cpu", (2, 2))}


def evaluate(penalty: Penalty, x: DTensor, step: float) -> Found:
    with Messages() as messages:
        near = penalty.prox(x, step)
    assert isinstance(near, DTensor)
    if x.dim() == 3:  # for one shape, since each prox takes many messages
        in_place = penalty.prox(x, step, out=x.clone())
        assert torch.equal(near.to_local(), in_place.to_local())
    keeps_layout = near.placements == x.placements and near.to_local().shape == x.to_local().shape
    return Found(near.full_tensor(), penalty.value(near), penalty.zero_groups(near), keeps_layout, messages.sent)


def evaluate_all(pairs: Pairs) -> dict[str, Found]:
    mesh = meshes()
    found = {}
    for case in CASES:
        for shape, (sizes, placements) in pairs_for(case, pairs):
            x = distribute_tensor(noise(shape), mesh[sizes], placements)
            found[f"{case} {shape} {sizes} {placements}"] = evaluate(case.make(1.0), x, 0.7)
    return found


class Evaluated(NamedTuple):
    """Pairs of a shape and a layout, and the results on them by rank."""

    pairs: Pairs
    found: list[dict[str, Found]]


@pytest.fixture(
    scope="module", params=[pytest.param(PAIRS, id="few"), pytest.param(ALL_PAIRS, id="all", marks=pytest.mark.slow)]
)
def evaluated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    pairs = request.param
    return Evaluated(pairs, processes.run_once(evaluate_all, 4, tmp_path_factory, f"dtensor-{len(pairs)}", pairs))


def is_local(penalty: Penalty, axes: int, placements: list[Placement]) -> bool:
    """Whether every group is on a single rank."""
    if penalty.separable:
        return True
    if not isinstance(penalty, Grouped) or penalty.dim is None:
        return False
    outer = {axis % axes for axis in ((penalty.dim,) if isinstance(penalty.dim, int) else penalty.dim)}
    return all(isinstance(p, Replicate) or p.dim in outer for p in placements if isinstance(p, (Shard, Replicate)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_equals_whole(evaluated: Evaluated, case: Case) -> None:
    for shape, (sizes, placements) in pairs_for(case, evaluated.pairs):
        whole, penalty = noise(shape), case.make(1.0)
        expected = penalty.prox(whole, 0.7)
        for results in evaluated.found:
            got = results[f"{case} {shape} {sizes} {placements}"]
            torch.testing.assert_close(got.prox, expected, rtol=0, atol=1e-12 * float(whole.abs().max()))
            assert torch.equal(got.prox == 0, expected == 0)
            torch.testing.assert_close(got.value, penalty.value(expected), rtol=1e-12, atol=1e-12)
            assert got.zero_groups == penalty.zero_groups(expected)
            assert got.keeps_layout


@pytest.mark.parametrize("case", CASES, ids=str)
def test_local_groups_send_nothing_and_sharded_groups_send_numbers(evaluated: Evaluated, case: Any) -> None:
    penalty = case.make(1.0)
    for shape, (sizes, placements) in pairs_for(case, evaluated.pairs):
        sent = evaluated.found[0][f"{case} {shape} {sizes} {placements}"].sent
        replicated = all(isinstance(p, Replicate) for p in placements)
        if replicated or is_local(penalty, len(shape), placements):
            assert sent == []
        elif isinstance(penalty, (Grouped, proxmo.Trimmed)):
            counted = penalty.zero_groups(noise(shape))
            groups = 1 if counted is None else counted[1]
            # sums and maxima send two 8-byte numbers per group, counts of equal elements one per rank
            assert {message.name for message in sent} == {"allreduce"}
            assert max(message.payload for message in sent) <= 8 * groups * max(4, *sizes)
        else:
            assert {message.name for message in sent} <= {"all_gather_into_tensor"}
            assert sent


def special_cases() -> dict[str, Any]:
    """Evaluate ties, NaN, half precision, tensor steps, gradients and other cases that are not in the table."""
    mesh = meshes()[(4,)]
    rank = mesh.get_local_rank()
    found: dict[str, Any] = {}

    def sharded(x: Tensor, axis: int = 1) -> DTensor:
        return distribute_tensor(x, mesh, [Shard(axis)])

    ties = torch.tensor([[1.0, -1, 1, 1, -1, 1, 0.5], [0, 0, 0, 0, 0, 0, 2.0]])
    for k in range(8):
        found[f"ties {k}"] = proxmo.TopK(k, dim=0).prox(sharded(ties), 1.0).full_tensor()
    with_nan = noise((3, 7), torch.float32)
    with_nan[1, 6] = math.nan  # on the last rank
    for penalty in (proxmo.GroupL2(0.1), proxmo.GroupLInf(0.1), proxmo.Simplex(dim=0), proxmo.TopK(2, dim=0)):
        found[f"nan {penalty}"] = penalty.prox(sharded(with_nan), 1.0).full_tensor()
        found[f"nan value {penalty}"] = penalty.value(sharded(with_nan))
    small = noise((6, 10), torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found[f"{dtype}"] = proxmo.GroupLInf(0.9).prox(sharded(small.to(dtype)), 0.7).full_tensor()
    found["tensor step"] = proxmo.GroupL2(0.9).prox(sharded(noise((3, 7))), torch.tensor(0.7)).full_tensor()
    found["step of zero"] = proxmo.Simplex().prox(sharded(noise((3, 7))), torch.tensor(0.0)).full_tensor()
    found["empty"] = proxmo.GroupL2(0.9).prox(sharded(torch.zeros(3, 0)), 1.0).to_local().shape
    for penalty in (proxmo.GroupL2(0.9), proxmo.Nuclear(0.3), proxmo.L1(0.2)):
        x = sharded(noise((3, 7))).requires_grad_()
        penalty.value(x).backward()
        assert isinstance(x.grad, DTensor)
        found[f"gradient {penalty}"] = x.grad.full_tensor()
    for out in (torch.zeros(3, 7), distribute_tensor(torch.zeros(3, 7), mesh, [Replicate()])):
        with pytest.raises(ValueError, match=r"^out must be "):
            proxmo.L1(0.1).prox(sharded(torch.zeros(3, 7)), 1.0, out=out)
    found["rank"] = rank
    return found


def test_special_cases_equal_whole_tensor(tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank, found in enumerate(processes.run(special_cases, 4, tmp_path_factory.mktemp("special"))):
        assert found["rank"] == rank
        for k in range(8):
            kept = found[f"ties {k}"]
            assert (kept != 0).sum(1).tolist() == [min(k, 7), min(k, 1)]
            assert kept[0].abs().sum() == min(k, 6) + (0.5 if k == 7 else 0)
        for penalty in (proxmo.GroupL2(0.1), proxmo.GroupLInf(0.1), proxmo.Simplex(dim=0), proxmo.TopK(2, dim=0)):
            with_nan = noise((3, 7), torch.float32)
            with_nan[1, 6] = math.nan
            expected = penalty.prox(with_nan, 1.0)
            torch.testing.assert_close(found[f"nan {penalty}"], expected, equal_nan=True)
            torch.testing.assert_close(found[f"nan value {penalty}"], penalty.value(with_nan), equal_nan=True)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            expected = proxmo.GroupLInf(0.9).prox(noise((6, 10), torch.bfloat16).to(dtype), 0.7)
            torch.testing.assert_close(found[f"{dtype}"], expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
        torch.testing.assert_close(found["tensor step"], proxmo.GroupL2(0.9).prox(noise((3, 7)), 0.7))
        assert torch.equal(found["step of zero"], noise((3, 7)))
        assert found["empty"] == (3, 0)
        for penalty in (proxmo.GroupL2(0.9), proxmo.Nuclear(0.3), proxmo.L1(0.2)):
            x = noise((3, 7)).requires_grad_()
            penalty.value(x).backward()
            torch.testing.assert_close(found[f"gradient {penalty}"], x.grad)


@dataclasses.dataclass
class Centred(Penalty):
    """A user-defined penalty, neither separable nor grouped: s/2·‖x − mean(x)‖²."""

    strength: float
    convex = True
    separable = False

    def _value(self, x: Tensor) -> Tensor:
        return self.strength / 2 * (x - x.mean()).square().sum()

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return torch.lerp(x, x.mean(), step * self.strength / (1 + step * self.strength))


def step_with_user_penalty() -> tuple[Tensor, Tensor, Tensor]:
    """Step a sharded and an ordinary tensor with a user-defined penalty."""
    mesh = meshes()[(4,)]
    params = [distribute_tensor(noise((5, 3)), mesh, [Shard(0)]), noise((4,), seed=1)]
    optimizer = proxmo.ProxSGD(params, lr=0.5, momentum=0.9, penalty=Centred(0.4), nonfinite="skip")
    partial = DTensor.from_local(noise((5, 3), seed=3) / 4, mesh, [Partial()], run_check=False)  # not yet reduced
    for seed in range(4):
        # gradients may have another layout than the parameters
        layout = (Shard(1), Replicate(), Shard(0), Partial())[seed]
        gradient = partial if seed == 3 else distribute_tensor(noise((5, 3), seed=seed), mesh, [layout])
        params[0].grad = gradient
        params[1].grad = noise((4,), seed=seed)
        optimizer.step()
    return params[0].full_tensor(), params[1], optimizer.penalty_value()  # type: ignore[attr-defined]


def test_user_penalty_on_sharded_and_ordinary_tensors(tmp_path_factory: pytest.TempPathFactory) -> None:
    params = [noise((5, 3)), noise((4,), seed=1)]
    optimizer = proxmo.ProxSGD(params, lr=0.5, momentum=0.9, penalty=Centred(0.4))
    for seed in range(4):
        for p in params:
            p.grad = noise(tuple(p.shape), seed=seed)
        optimizer.step()
    for found in processes.run(step_with_user_penalty, 4, tmp_path_factory.mktemp("user")):
        torch.testing.assert_close(found, (*params, optimizer.penalty_value()))


def compare_costs() -> list[tuple[str, Any, Any]]:
    """Return measured and predicted costs on meshes of one and two dimensions."""
    found = []
    for sizes, placements in LAYOUTS:
        x = distribute_tensor(noise((8, 1200), torch.float32), meshes()[sizes], placements)
        for penalty in (
            *(kind(0.9, dim=dim) for kind in (proxmo.GroupL2, proxmo.GroupLInf) for dim in (0, 1, ())),
            *(kind(0.9, dim=dim) for kind in (proxmo.L1Ball, proxmo.L2Ball, proxmo.Simplex) for dim in (0, 1, None)),
            *(proxmo.TopK(3, dim=dim) for dim in (0, 1, None)),
            proxmo.SparseGroup(0.1, 0.1, dim=1),
            proxmo.L1(0.1),
            proxmo.Nuclear(0.1),
        ):
            measured, predicted, passes = compare(penalty, x, 0.7)
            assert 0 <= passes <= 15
            found.append((f"{penalty} {sizes} {placements}", measured, predicted))
    return found


def test_measured_cost_equals_predicted_cost(tmp_path_factory: pytest.TempPathFactory) -> None:
    results = processes.run(compare_costs, 4, tmp_path_factory.mktemp("costs"))
    sizes = []
    for found in results:
        for name, measured, predicted in found:
            assert measured == predicted, name
            sizes.append(measured.size)
    assert sum(size > 0 for size in sizes) > len(sizes) / 4


# the root-finders exchange messages in every pass, so these are few: sharded by columns, and by rows and columns
FEW_LAYOUTS = [LAYOUTS[1], LAYOUTS[5]]
FEW_SHAPES = [(5, 3, 2)]


def steps_like(x: Tensor) -> Tensor:
    return noise(tuple(x.shape), seed=9).exp()


def evaluate_in_metric() -> dict[str, list[Tensor]]:
    """A step for every element, sharded like the tensor or whole on every rank, and one step per block."""
    mesh, found = meshes(), {}
    for case in CASES:
        penalty = case.make(1.0)
        for shape in FEW_SHAPES:
            if len(shape) < case.axes or not penalty.elementwise_step:
                continue
            whole = noise(shape)
            steps, per_block = steps_like(whole), steps_like(torch.empty(penalty.block_shape(whole)))
            for sizes, placements in FEW_LAYOUTS:
                x = distribute_tensor(whole, mesh[sizes], placements)
                given = [distribute_tensor(steps, mesh[sizes], placements), steps, per_block]
                results = [penalty.prox(x, step) for step in given]
                assert all(isinstance(near, DTensor) and near.placements == x.placements for near in results)
                found[f"{case} {shape} {sizes} {placements}"] = [near.full_tensor() for near in results]
    found["joint"] = [t for penalty in JOINT for t in _joint_results(penalty, mesh)]
    return found


JOINT = [
    proxmo.Trimmed(proxmo.L1(0.8), 9),
    proxmo.Trimmed(proxmo.GroupL2(0.8), 0.4),
    proxmo.Trimmed(proxmo.GroupLInf(0.8), 3),
    proxmo.TopK(11, scope="all"),
]


def lists_with_ties() -> list[Tensor]:
    """Return tensors with many equal magnitudes, some on different ranks."""
    return [(2 * noise(shape, seed=seed)).round() / 2 for seed, shape in enumerate([(5, 3), (4, 2), (6, 2), (3, 2)])]


def _joint_results(penalty: Penalty, mesh: dict[tuple[int, ...], DeviceMesh]) -> list[Tensor]:
    """Rank tensors together that are sharded by rows, by columns, in both ways, and not at all."""
    rows, columns, both, replicated = lists_with_ties()
    tensors = [
        distribute_tensor(rows, mesh[(4,)], [Shard(0)]),
        distribute_tensor(columns, mesh[(4,)], [Shard(1)]),
        distribute_tensor(both, mesh[(2, 2)], [Shard(0), Shard(1)]),
        replicated,
    ]
    value = penalty.total(tensors)
    penalty.prox_(tensors, 0.7)
    return [*(t.full_tensor() if isinstance(t, DTensor) else t for t in tensors), value]


def _assert_equal_up_to_ties(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare the sorted results of each penalty: of equal blocks any may be spared, but exactly as many."""
    for start in range(0, len(found), 5):
        *results, value = found[start : start + 5]
        *wanted, wanted_value = expected[start : start + 5]
        torch.testing.assert_close(value, wanted_value, rtol=1e-12, atol=1e-12)
        flat, wanted_flat = (torch.cat([t.flatten() for t in some]).abs().sort().values for some in (results, wanted))
        torch.testing.assert_close(flat, wanted_flat, rtol=0, atol=1e-12)


def test_step_for_every_element_of_a_sharded_tensor(tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = {}
    for case in CASES:
        for shape in FEW_SHAPES:
            penalty, whole = case.make(1.0), noise(shape)
            if len(shape) >= case.axes and penalty.elementwise_step:
                per_block = steps_like(torch.empty(penalty.block_shape(whole)))
                exact = penalty.prox(whole, steps_like(whole))
                expected[f"{case} {shape}"] = [exact, exact, penalty.prox(whole, per_block)]
    joint: list[Tensor] = []
    for penalty in JOINT:
        tensors = lists_with_ties()
        value = penalty.total(tensors)
        penalty.prox_(tensors, 0.7)
        joint += [*tensors, value]
    for found in processes.run_once(evaluate_in_metric, 4, tmp_path_factory, "dtensor-metric"):
        _assert_equal_up_to_ties(found.pop("joint"), joint)
        assert len(found) == len(FEW_LAYOUTS) * len(expected)
        for name, results in found.items():
            key = next(key for key in expected if name.startswith(key + " "))
            torch.testing.assert_close(results, expected[key], rtol=0, atol=1e-12)
