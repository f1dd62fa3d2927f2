"""`ProxAdamW` is AdamW without a penalty, and takes the exact prox in Adam's metric with one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo

SHAPES = [(5, 3), (7,), (2, 3, 2), ()]


def make_params(dtype: torch.dtype = torch.float64, shapes: list[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_gradients(params: list[Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype)


def assert_close(a: list[Parameter], b: list[Parameter], rtol: float = 1e-13) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("penalty", [None, proxmo.L1(0.0), proxmo.Trimmed(proxmo.L1(1.0), keep=1.0)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"foreach": True},
        {"foreach": False},
    ],
    ids=str,
)
def test_without_penalty_it_is_adamw(penalty: proxmo.Penalty | None, options: dict[str, Any]) -> None:
    ours, theirs = make_params(), make_params()
    prox, adamw = proxmo.ProxAdamW(ours, penalty=penalty, **options), torch.optim.AdamW(theirs, **options)
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        if step == 5:  # a parameter may miss a gradient; then its bias correction is that of fewer steps
            ours[1].grad = theirs[1].grad = None
        prox.step()
        adamw.step()
    assert_close(ours, theirs)
    for x, y in zip(ours, theirs, strict=True):
        assert prox.state[x].keys() == adamw.state[y].keys()
        for key, value in adamw.state[y].items():
            torch.testing.assert_close(prox.state[x][key], value, rtol=1e-13, atol=1e-15)


def test_large_tensors_are_cut_into_chunks_with_the_same_result() -> None:
    shapes = [(1100, 1000), (300, 2), (1_100_000,)]
    for penalty in (None, proxmo.L1(0.3), proxmo.GroupL2(0.5), proxmo.GroupL2(0.5, dim=None)):
        if penalty is not None and penalty != proxmo.L1(0.3):
            shapes = shapes[:2]
        ours, whole = make_params(torch.float32, shapes), make_params(torch.float32, shapes)
        optimizers = (
            proxmo.ProxAdamW(ours, 0.01, penalty=penalty),
            proxmo.ProxAdamW(whole, 0.01, penalty=penalty, foreach=True),
        )
        for step in range(2):
            set_gradients(ours, step)
            set_gradients(whole, step)
            for optimizer in optimizers:
                optimizer.step()
        assert_close(ours, whole, rtol=1e-6)


PENALTIES = [
    proxmo.L1(0.3),
    proxmo.ElasticNet(0.2, 0.5),
    proxmo.MCP(0.3),
    proxmo.GroupL2(0.5),
    proxmo.GroupL2(0.5, dim=1),
    proxmo.GroupLInf(0.4),
    proxmo.SparseGroup(0.1, 0.4),
    proxmo.Box(-0.5, 0.5),
    proxmo.L2Ball(1.0),
    proxmo.TopK(4),
    proxmo.Nuclear(0.3),
    proxmo.Rank(1),
    proxmo.Trimmed(proxmo.L1(0.8), keep=0.3, scope="each"),
    proxmo.Trimmed(proxmo.GroupL2(0.8), keep=0.3, scope="each"),
]


def reference_step(x: Tensor, m: Tensor, v: Tensor, k: int, g: Tensor, penalty: proxmo.Penalty, lr: float) -> Tensor:
    """Algorithm in its textbook form; v has one number for each element or for each block."""
    m.mul_(0.9).add_(0.1 * g)
    blocks = g.square().sum_to_size(v.shape) * (v.numel() / g.numel())
    v.mul_(0.999).add_(0.001 * blocks)
    step = lr / ((v / (1 - 0.999**k)).sqrt() + 1e-8)
    y = (1 - lr * 0.01) * x - step * m / (1 - 0.9**k)
    return penalty.prox(y, step if step.numel() > 1 else step.reshape(()))


@pytest.mark.parametrize("metric", ["element", "block"])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_step_is_the_prox_in_the_metric(penalty: proxmo.Penalty, metric: Any) -> None:
    params = make_params(shapes=[(5, 3), (4, 6)])
    optimizer = proxmo.ProxAdamW(params, lr=0.05, penalty=penalty, metric=metric)
    expected = [p.detach().clone() for p in params]
    per_element = metric == "element" and penalty.elementwise_step
    shapes = [p.shape if per_element else penalty.block_shape(p) for p in params]
    moments = [
        (torch.zeros_like(x), torch.zeros(shape, dtype=x.dtype)) for x, shape in zip(expected, shapes, strict=True)
    ]
    for k in range(1, 8):
        set_gradients(params, k)
        optimizer.step()
        for i, p in enumerate(params):
            assert p.grad is not None
            expected[i] = reference_step(expected[i], *moments[i], k, p.grad, penalty, 0.05)
    for p, x, shape in zip(params, expected, shapes, strict=True):
        torch.testing.assert_close(p.detach(), x, rtol=1e-9, atol=1e-11)
        assert torch.equal(p == 0, x == 0)
        assert optimizer.state[p]["exp_avg_sq"].shape == torch.Size(shape)


UNITS = [[(0, 0, None), (1, 0, None)], [(2, 1, ((0, 2), (1, 3)))]]


@pytest.mark.parametrize("metric", ["element", "block"])
@pytest.mark.parametrize("penalty", [proxmo.GroupL2(0.3), proxmo.GroupLInf(0.3)], ids=str)
def test_units_are_groups_that_span_tensors(penalty: proxmo.GroupL2 | proxmo.GroupLInf, metric: Any) -> None:
    """The units as rows of two matrices, given to the optimizer in place of the three tensors."""
    params = make_params(shapes=[(4, 3), (4,), (2, 5)])
    weight, bias, other = params
    columns = [[0, 2], [1, 3]]
    rows = [torch.cat([weight, bias[:, None]], 1), torch.stack([other[:, c].T.flatten() for c in columns])]
    matrices = [Parameter(row.detach().clone()) for row in rows]
    rest = Parameter(other[:, 4:].detach().clone())
    optimizer = proxmo.ProxAdamW([{"params": params, "penalty": penalty, "units": UNITS}], lr=0.05, metric=metric)
    alike = proxmo.ProxAdamW(matrices, lr=0.05, penalty=penalty, metric=metric)
    plain = proxmo.ProxAdamW([rest], lr=0.05, penalty=proxmo.GroupL2(0.0, dim=1), metric=metric)
    for step in range(6):
        set_gradients(params, step)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        matrices[0].grad = torch.cat([gradients[0], gradients[1][:, None]], 1)
        matrices[1].grad = torch.stack([gradients[2][:, c].T.flatten() for c in columns])
        rest.grad = gradients[2][:, 4:].clone()
        for each in (optimizer, alike, plain):
            each.step()
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), matrices[0].detach(), rtol=1e-9, atol=1e-11)
    found = torch.stack([other[:, c].T.flatten() for c in columns])
    torch.testing.assert_close(found, matrices[1].detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(other[:, 4:].detach(), rest.detach(), rtol=1e-9, atol=1e-11)


def test_adamw_checkpoints_load_and_go_back() -> None:
    ours, theirs = make_params(), make_params()
    prox, adamw = proxmo.ProxAdamW(ours, lr=0.5), torch.optim.AdamW(theirs, lr=0.02, maximize=True)
    for step in range(9):
        if step == 3:
            prox.load_state_dict(copy.deepcopy(adamw.state_dict()))
            for x, y in zip(ours, theirs, strict=True):
                x.data.copy_(y.data)
        if step == 6:
            adamw.load_state_dict(copy.deepcopy(prox.state_dict()))
            assert adamw.param_groups[0]["decoupled_weight_decay"]
        set_gradients(ours, step)
        set_gradients(theirs, step)
        adamw.step()
        if step >= 3:
            prox.step()
    assert_close(ours, theirs)


def test_adamw_checkpoint_keeps_the_penalty() -> None:
    x, y = make_params(shapes=[(3,)]), make_params(shapes=[(3,)])
    adamw, prox = torch.optim.AdamW(x), proxmo.ProxAdamW(y, penalty=proxmo.L1(0.3))
    set_gradients(x, 0)
    adamw.step()
    prox.load_state_dict(adamw.state_dict())
    assert prox.param_groups[0]["penalty"] == proxmo.L1(0.3)
    torch.testing.assert_close(prox.state[y[0]]["exp_avg"], adamw.state[x[0]]["exp_avg"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "coupled to the gradients"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "option of another optimizer|another optimizer"),
        (lambda p: proxmo.ProxAdamW(p, penalty=proxmo.L0(0.1)), "made with penalty L0"),
    ],
)
def test_other_checkpoints_are_refused(make: Any, message: str) -> None:
    x, y = make_params(shapes=[(3,)]), make_params(shapes=[(3,)])
    other, prox = make(x), proxmo.ProxAdamW(y, penalty=proxmo.L1(0.3))
    set_gradients(x, 0)
    other.step()
    before = copy.deepcopy(prox.state_dict())
    with pytest.raises(ValueError, match=message):
        prox.load_state_dict(other.state_dict())
    assert prox.state_dict() == before


def test_checkpoint_of_another_metric_continues_with_its_second_moments() -> None:
    params, twins = make_params(shapes=[(4, 6)]), make_params(shapes=[(4, 6)])
    block = proxmo.ProxAdamW(params, 0.05, penalty=proxmo.GroupL2(0.3), metric="block")
    element = proxmo.ProxAdamW(twins, 0.05, penalty=proxmo.GroupL2(0.3))
    for step in range(6):
        if step == 3:
            element.load_state_dict(copy.deepcopy(block.state_dict()))
            twins[0].data.copy_(params[0].data)
        for each, optimizer in ((params, block), (twins, element)):
            set_gradients(each, step)
            optimizer.step()
    assert_close(params, twins)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(dtype: torch.dtype) -> None:
    half, full = make_params(dtype), make_params(dtype)
    full = [Parameter(p.detach().float()) for p in full]
    optimizers = [proxmo.ProxAdamW(p, 0.01, penalty=proxmo.L1(0.05)) for p in (half, full)]
    for step in range(5):
        set_gradients(half, step)
        for p, q in zip(full, half, strict=True):
            p.data.copy_(q.data)  # so that one step is compared, not the rounding of many
            assert q.grad is not None
            p.grad = q.grad.float()
        if step == 2:
            twin = proxmo.ProxAdamW(half, 0.01, penalty=proxmo.L1(0.05))
            twin.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            optimizers[0] = twin
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(full, half, strict=True):
            assert torch.equal(p.to(dtype), q)
            assert optimizers[0].state[q]["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize(
    ("penalty", "metric"),
    [
        (None, "element"),
        (proxmo.L1(0.05), "element"),
        (proxmo.GroupLInf(0.1), "element"),
        (proxmo.GroupL2(0.1), "block"),
    ],
)
def test_compiled_step_equals_eager_step_without_graph_breaks(penalty: proxmo.Penalty | None, metric: Any) -> None:
    shapes = [(5, 3), (7,)]
    eager, compiled = make_params(shapes=shapes), make_params(shapes=shapes)
    lr = torch.tensor(0.01, dtype=torch.float64)
    one, other = (proxmo.ProxAdamW(p, lr, penalty=penalty, metric=metric) for p in (eager, compiled))
    step = torch.compile(other.step, fullgraph=True, backend="eager")
    for k in range(3):
        set_gradients(eager, k)
        set_gradients(compiled, k)
        one.step()
        step()
    assert_close(eager, compiled, rtol=1e-6)  # bias corrections are taken in float32 in a compiled step


def test_step_with_zero_lr_and_gradients_counts_for_nothing() -> None:
    params, twins = make_params(), make_params()
    optimizer, twin = proxmo.ProxAdamW(params, 0.0), proxmo.ProxAdamW(twins, 0.1)
    before = [p.detach().clone() for p in params]
    set_gradients(params, 0, scale=0.0)
    optimizer.step()
    assert all(map(torch.equal, params, before))
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in params)
    optimizer.param_groups[0]["lr"] = 0.1
    for each, own in ((params, optimizer), (twins, twin)):
        set_gradients(each, 1)
        own.step()
    assert_close(params, twins)


def test_certificates_are_subgradients_in_any_metric() -> None:
    """At the minimum of f the certificate proves stationarity: direction + subgradient vanishes."""
    target = torch.tensor([[3.0, 0.2], [-1.0, 0.1]], dtype=torch.float64)
    x = Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = proxmo.ProxAdamW([x], 0.05, weight_decay=0.0, penalty=proxmo.GroupL2(0.5))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    optimizer.certify = True
    for _ in range(495):
        x.grad = x.detach() - target
        optimizer.step()
        scheduler.step()
    proof = optimizer.certificate(x)
    torch.testing.assert_close(proof.direction, x.detach() - target, rtol=0, atol=1e-6)
    torch.testing.assert_close(proof.subgradient, -proof.direction, rtol=0, atol=1e-5)
    norms = target.norm(dim=1, keepdim=True)
    torch.testing.assert_close(x.detach(), target * (1 - 0.5 / norms).clamp(min=0), rtol=0, atol=1e-5)


def test_weights_without_gradients_vanish_at_once() -> None:
    x = Parameter(torch.ones(3))
    optimizer = proxmo.ProxAdamW([x], 1e-3, penalty=proxmo.L1(1e-3))
    x.grad = torch.tensor([0.0, 1.0, -1.0])
    optimizer.step()
    assert (x == 0).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": 0.9}, TypeError, r"betas must be two numbers in \[0, 1\)"),
        ({"eps": -1.0}, ValueError, "eps must be"),
        ({"weight_decay": math.nan}, ValueError, "weight_decay must be"),
        ({"metric": "tensor"}, ValueError, "metric must be one of"),
        ({"momentum": 0.9}, TypeError, "unexpected keyword argument 'momentum'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        proxmo.ProxAdamW(make_params(), **options)


def test_penalty_that_needs_one_number_is_refused_in_a_running_optimizer() -> None:
    params = make_params(shapes=[(4, 3)])
    optimizer = proxmo.ProxAdamW(params)
    set_gradients(params, 0)
    optimizer.step()
    before = params[0].detach().clone()
    optimizer.param_groups[0]["penalty"] = proxmo.Nuclear(0.1)
    with pytest.raises(ValueError, match="penalty must take a step for every element"):
        optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("penalty", [proxmo.Trimmed(proxmo.L1(1e10), keep=2), proxmo.TopK(2, scope="all")], ids=str)
def test_tensors_of_one_element_are_ranked_like_the_others(penalty: proxmo.Penalty) -> None:
    params = [Parameter(torch.tensor([1.0, 2.0, 3.0])), Parameter(torch.tensor([5.0]))]
    optimizer = proxmo.ProxAdamW(params, 1e-3, weight_decay=0.0, penalty=penalty)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [(p != 0).tolist() for p in params] == [[False, False, True], [True]]


@pytest.mark.parametrize("penalty", [proxmo.Trimmed(proxmo.L1(1e10), keep=2), proxmo.TopK(2, scope="all")], ids=str)
def test_parameter_without_gradient_keeps_its_place_in_the_ranking(penalty: proxmo.Penalty) -> None:
    params = [Parameter(torch.tensor([1.0, 2.0])), Parameter(torch.tensor([5.0, 6.0]))]
    optimizer = proxmo.ProxAdamW(params, 1e-3, weight_decay=0.0, penalty=penalty)
    params[0].grad = torch.ones(2)
    optimizer.step()
    assert [p.count_nonzero().item() for p in params] == [0, 2]


@pytest.mark.parametrize("penalty", [proxmo.GroupL2(0.3), proxmo.Nuclear(0.3)], ids=str)
def test_adamw_checkpoint_is_reduced_to_blocks(penalty: proxmo.Penalty) -> None:
    theirs, ours = make_params(shapes=[(4, 6)]), make_params(shapes=[(4, 6)])
    adamw = torch.optim.AdamW(theirs)
    prox = proxmo.ProxAdamW(ours, penalty=penalty, metric="block")
    set_gradients(theirs, 0)
    adamw.step()
    prox.load_state_dict(adamw.state_dict())
    expected = adamw.state[theirs[0]]["exp_avg_sq"]
    expected = expected.mean(1, keepdim=True) if isinstance(penalty, proxmo.GroupL2) else expected.mean().reshape(1, 1)
    torch.testing.assert_close(prox.state[ours[0]]["exp_avg_sq"], expected)
    set_gradients(ours, 1)
    prox.step()


def test_float64_checkpoint_loads_into_half_precision() -> None:
    wide, half = make_params(shapes=[(3,)]), make_params(torch.bfloat16, [(3,)])
    saved, optimizer = torch.optim.AdamW(wide), proxmo.ProxAdamW(half)
    set_gradients(wide, 0)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    set_gradients(half, 1)
    optimizer.step()
    assert optimizer.state[half[0]]["exp_avg"].dtype == torch.float32
