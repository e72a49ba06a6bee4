"""Steps on the local tensors: what one process gets, and only where that is all there is to do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dtensors import world
from torch import nn, optim

from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from weft.dtensor.interop import optimizer_step

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {}),
    "sgd, nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam, amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw, maximize": (optim.AdamW, {"maximize": True}),
    "adamw, rate in a tensor": (optim.AdamW, {"lr": torch.tensor(0.1)}),
    "adamax": (optim.Adamax, {}),
    "nadam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (optim.Rprop, {}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "adadelta": (optim.Adadelta, {}),
    "asgd": (optim.ASGD, {}),
}
LAYOUTS: list[Any] = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)], [Replicate()]]
SHAPES = [(5, 3), (4, 6), (7, 2), (2,), ()]


@contextmanager
def steps_taken() -> Iterator[list[bool]]:
    """Of each step within: whether a stand-in took it."""
    taken: list[bool] = []
    make = optimizer_step._stand_in

    def spy(optimizer: Any) -> Any:
        taken.append(False)
        stand_in = make(optimizer)
        taken[-1] = True
        return stand_in

    with patch.object(optimizer_step, "_stand_in", spy):
        yield taken


def parameters() -> tuple[list[Any], list[Any]]:
    """The same on one process and on all."""
    mesh = world()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    return [nn.Parameter(t.clone()) for t in whole], [
        nn.Parameter(distribute_tensor(t, mesh, p)) for t, p in zip(whole, LAYOUTS, strict=True)
    ]


def give_gradients(plain: list[Any], ours: list[Any], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p, q in zip(plain, ours, strict=True):
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements)
        if number == 2 and p.dim() == 1:
            p.grad = q.grad = None  # of what was not used


def assert_same(plain: list[Any], ours: list[Any]) -> None:
    for p, q in zip(plain, ours, strict=True):
        assert type(q) is DTensor
        torch.testing.assert_close(q.detach().full_tensor(), p.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "foreach"),
    [
        (name, foreach)
        for name, (_, options) in OPTIMIZERS.items()
        for foreach in (False, True)
        if not (foreach and "lr" in options)  # which torch refuses
    ],
)
def test_a_step_is_that_of_one_process(name: str, foreach: bool) -> None:
    kind, options = OPTIMIZERS[name]
    plain, ours = parameters()

    def optimizer(params: list[Any]) -> Any:
        return kind(params, **copy.deepcopy(options), foreach=foreach)

    theirs, mine = optimizer(plain), optimizer(ours)
    with steps_taken() as taken:
        for number in range(5):
            give_gradients(plain, ours, number)
            versions = [p._version for p in ours]
            theirs.step()
            mine.step()
            assert_same(plain, ours)
            for p, version in zip(ours, versions, strict=True):
                assert (p._version > version) == (p.grad is not None), (number, p.shape, taken)
            if number == 2:
                saved = [copy.deepcopy(each.state_dict()) for each in (theirs, mine)]
                theirs, mine = optimizer(plain), optimizer(ours)
                theirs.load_state_dict(saved[0])
                mine.load_state_dict(saved[1])
            for p in ours:
                for value in mine.state[p].values() if p in mine.state else ():
                    of_elements = isinstance(value, torch.Tensor) and value.shape == p.shape != ()
                    assert not of_elements or type(value) is DTensor
    # The first one makes the state, where there is any.
    made_at_once = name in ("sgd", "adagrad")
    assert taken == [made_at_once, True, True, True, True]


@pytest.mark.ranks(2)
def test_where_more_is_to_be_done_it_goes_by_operations() -> None:
    plain, ours = parameters()
    theirs, mine = (optim.Adam(p, lr=0.1) for p in (plain, ours))
    mesh = ours[0].device_mesh

    def step(number: int, closure: Any = None) -> bool:
        give_gradients(plain, ours, number)
        if number == 3:  # a gradient whose terms are not added yet: that is done first, once
            share = plain[0].grad / mesh.size()
            summed = DTensor.from_local(share, mesh, [Partial()]).redistribute(mesh, [Partial()])
            ours[0].grad = summed
        with steps_taken() as taken:
            theirs.step()
            mine.step(closure)
        assert_same(plain, ours)
        return taken == [True]

    assert not step(0)
    assert step(1)
    assert step(3)
    assert not step(4, closure=lambda: None)

    def double(optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad * 2

    hooks = [each.register_step_pre_hook(double) for each in (theirs, mine)]
    assert not step(5)
    for hook in hooks:
        hook.remove()
    assert step(6)
    mine.param_groups[0]["betas"] = theirs.param_groups[0]["betas"] = (0.5, 0.9)
    scheduled = [optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (theirs, mine)]
    assert step(7)
    for each in scheduled:
        each.step()
    assert step(8)


@pytest.mark.ranks(2)
def test_what_changes_between_steps_is_seen() -> None:
    plain, ours = parameters()

    def optimizer(p: list[Any]) -> Any:
        groups = [{"params": p[:2]}, {"params": p[2:], "momentum": 0.9}]
        return optim.SGD(groups, lr=0.1, foreach=True)

    both = theirs, mine = optimizer(plain), optimizer(ours)
    for number in (0, 1, 3, 4, 5, 6, 7, 8):
        give_gradients(plain, ours, number)
        if number == 4:  # other memory
            for p in (*plain, *ours):
                p.data = p.data + 1
        for each in both:
            if number == 5:
                for state in each.state.values():
                    state["momentum_buffer"] = state["momentum_buffer"] * 2
            if number == 6:  # from now on all have a state
                each.param_groups[0]["momentum"] = 0.5
            if number == 8:
                each.param_groups[0]["params"].append(each.param_groups[1]["params"].pop())
            each.step()
        assert_same(plain, ours)
        for p, q in zip(plain, ours, strict=True):
            states = theirs.state.get(p, {}), mine.state.get(q, {})
            assert states[0].keys() == states[1].keys(), (number, p.shape)


@pytest.mark.ranks(2)
def test_an_error_amid_a_step_leaves_the_optimizer_as_it_is() -> None:
    plain, ours = parameters()
    theirs, mine = (optim.Adam(p, lr=0.1) for p in (plain, ours))
    for number in (0, 1):
        give_gradients(plain, ours, number)
        theirs.step()
        if number == 1:
            mine.param_groups[0]["lr"] = "no number"
            with pytest.raises(TypeError):
                mine.step()
            mine.param_groups[0]["lr"] = 0.1
            assert all(type(p) is DTensor for p in mine.param_groups[0]["params"])
            assert set(mine.state) == set(ours)
            return
        mine.step()


@pytest.mark.ranks(2)
def test_steps_of_a_gradient_scaler() -> None:
    plain, ours = parameters()
    theirs, mine = (optim.AdamW(p, lr=0.1, fused=True) for p in (plain, ours))
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for number in (0, 1, 3, 4):
        give_gradients(plain, ours, number)
        if number == 3:  # a step that both leave out
            plain[0].grad.fill_(float("inf"))
            ours[0].grad.fill_(float("inf"))
        for scaler, optimizer in zip(scalers, (theirs, mine), strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        assert_same(plain, ours)


def test_a_compiled_step_of_plain_tensors() -> None:
    plain, other = ([nn.Parameter(torch.ones(3))] for _ in range(2))
    optimizers = [optim.AdamW(p, lr=0.1) for p in (plain, other)]
    compiled = torch.compile(optimizers[0].step, backend="eager")
    for step in (compiled, optimizers[1].step):
        for p in (*plain, *other):
            p.grad = torch.full((3,), 2.0)
        step()
    torch.testing.assert_close(plain, other)


@pytest.mark.ranks(2)
def test_lbfgs_where_a_parameter_has_no_gradient() -> None:
    """LBFGS takes zeros in its place, by `Tensor.new`."""
    found = []
    for parameters_of in parameters():
        used, unused, *_ = parameters_of
        optimizer = optim.LBFGS([used, unused], max_iter=3)

        def closure(p: Any = used, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = (p - 1).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        found.append([p.full_tensor() if isinstance(p, DTensor) else p for p in (used, unused)])
    torch.testing.assert_close(*found)
