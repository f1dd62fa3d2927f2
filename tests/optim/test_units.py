"""Units: groups of a penalty that span several tensors."""

import copy
import io

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import proxmo
from proxmo.criteria import gradient_norm
from proxmo.optim.proximal_step import apply_prox
from proxmo.optim.units import Slice, joined, write_back

WHOLE = None
# rows of a weight, each with its bias; pairs of columns of a tensor, each with one element of another
UNITS = (
    (Slice(0, 0, WHOLE), Slice(1, 0, WHOLE)),
    (Slice(2, 1, ((0, 3), (1, 2))), Slice(3, 0, ((4,), (0,)))),
)
SHAPES = ((3, 4, 2), (3,), (2, 4), (5,))


def make_params(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [x.to(dtype).requires_grad_() for x in draw]


def set_gradients(params: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def make(params: list[Tensor], penalty: proxmo.Penalty | None, **options: object) -> proxmo.ProxSGD:
    return proxmo.ProxSGD([{"params": params, "penalty": penalty, "units": UNITS}], **options)  # type: ignore[arg-type]


def reference_shrink(blocks: list[NDArray[np.float64]], threshold: float) -> None:
    """Apply the prox of the group lasso to one unit in place, in numpy."""
    norm = np.sqrt(sum((block**2).sum() for block in blocks))
    for block in blocks:
        block *= max(0.0, 1 - threshold / norm)


def test_step_applies_the_prox_to_whole_units() -> None:
    params = make_params()
    optimizer = make(params, proxmo.GroupL2(2.0), lr=0.1, momentum=0.7)
    points = [p.detach().numpy().copy() for p in params]
    averages: list[NDArray[np.float64]] = []
    for step in range(20):
        set_gradients(params, step)
        gradients = [p.grad.numpy().copy() for p in params if p.grad is not None]
        averages = [0.7 * m + 0.3 * g for m, g in zip(averages, gradients, strict=True)] if averages else gradients
        optimizer.step()
        for point, average in zip(points, averages, strict=True):
            point -= 0.1 * average
        for row in range(3):
            reference_shrink([points[0][row : row + 1], points[1][row : row + 1]], 0.2)
        for columns, place in (((0, 3), 4), ((1, 2), 0)):
            block = points[2][:, columns]  # a copy
            reference_shrink([block, points[3][place : place + 1]], 0.2)
            points[2][:, columns] = block
        for p, point in zip(params, points, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), point, rtol=1e-12, atol=1e-14)
    assert float(params[3].detach()[1]) != 0  # in no unit: only gradients move it


@pytest.mark.parametrize("penalty", [proxmo.GroupL2(60.0), proxmo.GroupLInf(300.0), proxmo.SparseGroup(1.0, 60.0)])
def test_units_become_zero_as_a_whole(penalty: proxmo.Penalty) -> None:
    params = make_params()
    optimizer = make(params, penalty, lr=0.1, momentum=0.0)
    set_gradients(params, 0)
    optimizer.step()
    assert not params[0].any()
    assert not params[1].any()
    assert not params[2].any()
    assert [bool(x) for x in params[3]] == [False, True, True, True, False]
    families = (proxmo.FamilySparsity("parameter 0", 3, 3), proxmo.FamilySparsity("parameter 2", 2, 2))
    assert optimizer.sparsity() == [proxmo.Sparsity(zeros=(24 + 3 + 8 + 2) / 40, groups=1.0, families=families)]


@pytest.mark.parametrize("penalty", [proxmo.GroupL2(0.5), proxmo.GroupLInf(0.5), proxmo.SparseGroup(0.1, 0.5)])
def test_penalty_value_and_subgradients_are_those_of_the_units(penalty: proxmo.Penalty) -> None:
    params = make_params()
    optimizer = make(params, penalty, lr=0.1, momentum=0.0)
    expected = sum(float(penalty.value(joined(family, [p.detach() for p in params]))) for family in UNITS)
    assert float(optimizer.penalty_value()) == pytest.approx(expected, rel=1e-12)
    optimizer.certify = True
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    gradients = [p.grad.clone() for p in params if p.grad is not None]
    optimizer.step()
    for p, old, gradient in zip(params, before, gradients, strict=True):
        certificate = optimizer.certificate(p)
        torch.testing.assert_close(certificate.subgradient, (old - p.detach()) / 0.1 - gradient, rtol=1e-9, atol=1e-9)
    # the subgradient inequality at random points
    for seed in range(1, 20):
        other = [p.detach() for p in make_params(seed)]
        rise = sum(
            float((optimizer.certificate(p).subgradient * (u - p.detach())).sum())
            for p, u in zip(params, other, strict=True)
        )
        there = sum(float(penalty.value(joined(family, other))) for family in UNITS)
        assert there >= float(optimizer.penalty_value()) + rise - 1e-9


def test_gradient_norm_equals_that_of_autograd() -> None:
    params = make_params()
    optimizer = make(params, proxmo.GroupL2(0.5))
    set_gradients(params, 0)
    points = [p.detach().clone().requires_grad_() for p in params]
    loss = sum((x * p.grad).sum() for x, p in zip(points, params, strict=True) if p.grad is not None)
    value = 0.5 * (points[0].square().sum((1, 2)) + points[1].square()).sqrt().sum()
    value = value + 0.5 * (points[2][:, [0, 3]].square().sum() + points[3][4].square()).sqrt()
    value = value + 0.5 * (points[2][:, [1, 2]].square().sum() + points[3][0].square()).sqrt()
    gradients = torch.autograd.grad(loss + value, points)
    assert gradient_norm(optimizer) == pytest.approx(sum(float(g.square().sum()) for g in gradients), rel=1e-12)


def test_resumed_run_equals_uninterrupted_run_and_units_must_match() -> None:
    def run(optimizer: proxmo.ProxSGD, params: list[Tensor], steps: range) -> None:
        for step in steps:
            set_gradients(params, step)
            optimizer.step()

    uninterrupted = make_params()
    run(make(uninterrupted, proxmo.GroupLInf(0.5), lr=0.1), uninterrupted, range(10))
    params = make_params()
    optimizer = make(params, proxmo.GroupLInf(0.5), lr=0.1)
    run(optimizer, params, range(5))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [p.clone().requires_grad_() for p in saved["params"]]
    other = make(resumed, proxmo.GroupLInf(0.1), lr=0.3)
    other.load_state_dict(saved["optimizer"])
    run(other, resumed, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted, resumed, strict=True))
    without_units = proxmo.ProxSGD(make_params(), penalty=proxmo.GroupLInf(0.1, dim=0))
    with pytest.raises(ValueError, match="as unit_groups makes them"):
        without_units.load_state_dict(saved["optimizer"])
    assert without_units.param_groups[0]["penalty"].strength == 0.1


def test_deepcopied_optimizer_keeps_its_units() -> None:
    params = make_params()
    optimizer = make(params, proxmo.GroupL2(0.5), lr=0.1)
    twin = copy.deepcopy(optimizer)
    twins = twin.param_groups[0]["params"]
    for group in (params, twins):
        set_gradients(group, 0)
    optimizer.step()
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_step_equals_float64_step_up_to_rounding(dtype: torch.dtype) -> None:
    params, exact = make_params(dtype=dtype), make_params(dtype=dtype)
    exact = [p.detach().double().requires_grad_() for p in exact]
    for group in (params, exact):
        set_gradients(group, 3)
    for p, e in zip(params, exact, strict=True):
        e.grad = p.grad.double() if p.grad is not None else None
    make(params, proxmo.GroupL2(0.5), lr=0.1).step()
    make(exact, proxmo.GroupL2(0.5), lr=0.1).step()
    eps = torch.finfo(dtype).eps
    for p, e in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), e.detach(), rtol=2 * eps, atol=2 * eps)


def test_compiled_step_equals_eager_step() -> None:
    params, others = make_params(dtype=torch.float32), make_params(dtype=torch.float32)
    optimizer, compiled = (make(group, proxmo.GroupL2(0.5), lr=0.1) for group in (params, others))
    step = torch.compile(compiled.step, fullgraph=True, backend="eager")
    for seed in range(3):
        for group in (params, others):
            set_gradients(group, seed)
        optimizer.step()
        step()
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p, other)


@pytest.mark.parametrize("method", [proxmo.ProxSTORM, proxmo.ProxSpiderBoost, proxmo.AutoProxSGD, proxmo.ProxAdamW])
def test_other_methods_support_units(method: type[proxmo.ProxOptimizer]) -> None:
    params = make_params()
    group = {"params": params, "penalty": proxmo.GroupL2(50.0), "units": UNITS}
    options = {"lr": 1.0 if method is proxmo.AutoProxSGD else 0.05}
    if method is proxmo.ProxSpiderBoost:
        options["period"] = 1
    optimizer = method([group], **options)  # type: ignore[arg-type]

    def closure() -> float:
        optimizer.zero_grad()
        loss = sum(((p - 1).square().sum() for p in params), torch.zeros((), dtype=torch.float64)) / 2
        loss.backward()
        return loss.item()

    for _ in range(60):
        optimizer.step(closure)
    assert optimizer.sparsity()[0].groups == 1.0
    assert params[3][1] != 0


def test_units_without_any_gradient_are_skipped() -> None:
    params, together = make_params(), make_params()
    optimizer = make(params, proxmo.GroupL2(0.5), lr=0.1)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    reference = make(together, proxmo.GroupL2(0.5), lr=0.1)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(together, step)
        params[2].grad = params[3].grad = None  # all parameters of the second family
        optimizer.step()
        reference.step()
    assert torch.equal(params[2], before[2])
    assert torch.equal(params[3], before[3])
    for p, expected in zip(params[:2], together[:2], strict=True):
        torch.testing.assert_close(p, expected, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_parameter_without_gradient_is_left_out_of_its_units(fused: bool) -> None:
    """A frozen bias stays, and the rest of each unit is one group."""
    params, weight_only = make_params(), make_params()
    optimizer = make(params, proxmo.GroupL2(2.0), lr=0.1, fused=fused)
    alone = proxmo.ProxSGD([{"params": [weight_only[0]], "penalty": proxmo.GroupL2(2.0)}], lr=0.1)
    before = params[1].detach().clone()
    for step in range(3):
        set_gradients(params, step)
        weight_only[0].grad = params[0].grad.clone()  # type: ignore[union-attr]
        params[1].grad = None
        optimizer.step()
        alone.step()
    assert torch.equal(params[1], before)
    torch.testing.assert_close(params[0], weight_only[0])


def test_frozen_parameters_do_not_count_in_sparsity_and_penalty_value() -> None:
    layer = nn.Linear(4, 3)
    units = (((0, 0, None), (1, 0, None)),)
    group = {"params": list(layer.parameters()), "penalty": proxmo.GroupL2(1.0), "units": units}
    optimizer = proxmo.ProxSGD([group])
    layer.bias.requires_grad_(False)
    with torch.no_grad():
        layer.weight[0] = 0.0
    of_weight = (proxmo.FamilySparsity("parameter 0", zero=1, units=3),)
    assert optimizer.sparsity() == [proxmo.Sparsity(zeros=1 / 3, groups=1 / 3, families=of_weight)]
    torch.testing.assert_close(optimizer.penalty_value(), layer.weight.norm(dim=1).sum())
    layer.weight.requires_grad_(False)
    assert optimizer.penalty_value() == 0
    assert optimizer.sparsity() == [proxmo.Sparsity(zeros=0.0, groups=None)]


def test_sparsity_counts_the_units_of_each_family_by_name() -> None:
    names = ("encoder.conv.weight", "encoder.conv.bias", "shift", "norm.weight")
    params = make_params()
    group = {"params": list(zip(names, params, strict=True)), "penalty": proxmo.GroupL2(1.0), "units": UNITS}
    optimizer = proxmo.ProxSGD([group, {"params": [("head", torch.zeros(2))], "penalty": proxmo.L1(0.1)}])
    with torch.no_grad():
        params[0][:2], params[1][:2] = 0.0, 0.0  # two units
        params[2][:, [0, 3]] = 0.0  # all of a unit but the element in the last parameter
    units, head = optimizer.sparsity()
    assert units.families == (("encoder.conv", 2, 3), ("shift", 0, 2))
    assert units.groups == 2 / 5
    assert repr(units).endswith(f", groups=0.4, families={units.families})")
    assert head.families == ()
    assert repr(head) == "Sparsity(zeros=1.0, groups=None)"


def test_families_keep_their_names_when_earlier_parameters_are_frozen() -> None:
    names = ("first.weight", "first.bias", "second.weight", "second.bias")
    params = [nn.Parameter(p.detach()) for p in make_params()]
    group = {"params": list(zip(names, params, strict=True)), "penalty": proxmo.GroupL2(1.0), "units": UNITS}
    optimizer = proxmo.ProxSGD([group])
    params[0].requires_grad_(False)
    assert optimizer.sparsity()[0].families == (("first", 0, 3), ("second", 0, 2))
    params[1].requires_grad_(False)
    assert optimizer.sparsity()[0].families == (("second", 0, 2),)


@pytest.mark.parametrize("per_unit", [False, True])
def test_elementwise_steps_are_joined_like_their_tensors(per_unit: bool) -> None:
    """Adaptive methods need this: they have a step for every element of every tensor."""
    points, penalty = make_params(), proxmo.GroupL2(1.3)
    steps = [make_params(seed=5)[k].detach().exp() for k in range(4)]
    if per_unit:
        steps = [torch.rand(()).double().expand(p.shape) for p in points]
    with torch.no_grad():
        expected = [p.clone() for p in points]
        for family in UNITS:
            matrix = penalty.prox(joined(family, expected), joined(family, steps))
            write_back(family, matrix, expected)
        apply_prox(penalty, UNITS, points, steps)
    assert all(torch.equal(p, wanted) for p, wanted in zip(points, expected, strict=True))


@pytest.mark.parametrize(
    ("penalty", "units", "message"),
    [
        (proxmo.L1(1.0), UNITS, "group penalty with dim=0"),
        (proxmo.GroupL2(1.0, dim=1), UNITS, "group penalty with dim=0"),
        (proxmo.GroupL2(1.0), ((Slice(9, 0, None),),), "axis 0 of parameter 9"),
        (proxmo.GroupL2(1.0), ((Slice(1, 1, None),),), "axis 1 of parameter 1"),
        (proxmo.GroupL2(1.0), ((Slice(1, 0, ((3,),)),),), "beyond the size 3"),
        (proxmo.GroupL2(1.0), ((Slice(0, 0, None), Slice(3, 0, None)),), r"same number of units in each.*\[3, 5\]"),
        (proxmo.GroupL2(1.0), ((Slice(3, 0, ((0, 1), (2,))),),), "same number of indices each in parameter 3"),
        (proxmo.GroupL2(1.0), ((Slice(3, 0, ((0,), (0,))),),), "some of parameter 3 twice"),
        (proxmo.GroupL2(1.0), ((Slice(0, 0, None),), (Slice(0, 1, None),)), "some of parameter 0 twice"),
        (proxmo.GroupL2(1.0), "abc", "families of .position, axis, indices."),
        (proxmo.GroupL2(1.0), 5, "families of .position, axis, indices."),
        (proxmo.GroupL2(1.0), [[(0, 0)]], "families of .position, axis, indices."),
    ],
)
def test_invalid_units_are_refused(penalty: proxmo.Penalty, units: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        proxmo.ProxSGD([{"params": make_params(), "penalty": penalty, "units": units}])


def test_units_may_be_nested_lists_and_an_empty_list_becomes_none() -> None:
    lists = [[[0, 0, None], [1, 0, None]], [[2, 1, [[0, 3], [1, 2]]], [3, 0, [[4], [0]]]]]
    group = {"params": make_params(), "penalty": proxmo.GroupL2(1.0), "units": lists}
    assert proxmo.ProxSGD([group]).param_groups[0]["units"] == UNITS
    nothing = proxmo.ProxSGD([{"params": make_params(), "units": []}])
    nothing.load_state_dict(nothing.state_dict())
    assert nothing.param_groups[0]["units"] is None


def test_writing_back_is_the_inverse_of_joining() -> None:
    tensors = [p.detach() for p in make_params()]
    channels_last = torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last)
    for family, group in ((UNITS[1], tensors), ((Slice(0, 0, None),), [channels_last])):
        before = [t.clone() for t in group]
        matrix = joined(family, group)
        write_back(family, 2 * matrix, group)
        assert torch.equal(joined(family, group), 2 * matrix)
        changed = sum(int((t != old).sum()) for t, old in zip(group, before, strict=True))
        assert changed == matrix.numel()  # and nothing else


def test_zero_units_have_zero_output() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    images = torch.randn(5, 2, 6, 6)
    groups = proxmo.unit_groups(model, images, proxmo.GroupL2(1e3))
    optimizer = proxmo.ProxSGD(groups, lr=0.1)
    model(images).sum().backward()
    optimizer.step()
    for training in (True, False):
        hidden = model.train(training)[:3](images)
        assert torch.equal(hidden, torch.zeros_like(hidden))
