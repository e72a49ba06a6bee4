"""Every pair of layouts of the two factors of a product, and every layout of its result.

What moves is compared with the least that is possible, by trying: each way to place the factors
from which ranks can multiply by themselves, one collective for each change that takes one. The
gradients, in the layouts of the factors, have such a least each.

The letters are those of `test_dtensor_fusion`: a capital one is done by a fused op; "a" is an
all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_dtensor_fusion import check, close, counted, grid, moved
from torch import Tensor
from torch.nn import functional

import weft
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
TRANSPOSED = {S0: S1, S1: S0, R: R, P: P}
# x (rows, K) @ w (K, N) -> y (rows, N), of what each rank has.
ALONE = [(R, R, R), (S0, R, S0), (R, S1, S1), (S1, S0, P), (P, R, P), (R, P, P)]

# x, w: what moves, forward | backward, where y is wanted as R, as S0, as S1.
MOVES: dict[Any, tuple[str, str, str]] = {
    (R, R): (" | ", " | g", " | g"),
    (R, S0): ("R | g", "S | Gg", "S | Gg"),
    (R, S1): ("g | R", "a | aR", " | R"),
    (R, P): ("R | r", "S | Gr", "S | Gr"),
    (S0, R): ("g | r", " | r", "a | ar"),
    (S0, S0): ("aR | a", "aS | Ga", "aS | Ga"),
    (S0, S1): ("Gg | S", "Ga | aS", "G | S"),
    (S0, P): ("gR | s", "gS | Gs", "gS | Gs"),
    (S1, R): ("R | g", "S | Gg", "S | Gg"),
    (S1, S0): ("R | ", "S | G", "S | G"),
    (S1, S1): ("gg | gS", "ga | agS", "g | gS"),
    (S1, P): ("gR | s", "gS | Gs", "gS | Gs"),
    (P, R): ("R | r", "S | Gr", "S | Gr"),
    (P, S0): ("sR | g", "sS | Gg", "sS | Gg"),
    (P, S1): ("rg | rR", "ra | arR", "r | rR"),
    (P, P): ("rR | r", "rS | Gr", "rS | Gr"),
}
# A product is made before it is known how its result is wanted: with whole weights there would be
# one collective less.
ONE_MORE = [(S0, S0, S0), (S0, S1, S0), (S0, P, S0)]
CASES = [
    (x, w, y, told)
    for (x, w), moves in MOVES.items()
    for y, told in zip((R, S0, S1), moves, strict=True)
]


def changes(old: Any, new: Any) -> int:
    """Collectives of a change of layout."""
    return int(old not in (new, R))


def least(x: Any, w: Any, y: Any) -> int:
    return min(changes(x, a) + changes(w, b) + changes(c, y) for a, b, c in ALONE)


def reduced(placement: Any) -> Any:
    """How a gradient is placed."""
    return R if placement == P else placement


def test_the_tables_are_the_least_that_is_possible() -> None:
    """All but those of which a comment above tells why."""
    for x, w, y, told in CASES:
        forward, backward = told.split(" | ")
        assert len(forward) == least(x, w, y) + ((x, w, y) in ONE_MORE), (x, w, y)
        of_x = least(y, TRANSPOSED[w], reduced(x))
        of_w = least(TRANSPOSED[x], y, reduced(w))
        assert len(backward) <= of_x + of_w, (x, w, y)
        # What is left of a product that is a sum is reduced by the fused op.
        assert not forward.endswith(("s", "r")) or x == P, (x, w, y)


def own(whole: Tensor, placement: Any, rank: int, world_size: int) -> Tensor:
    """This rank's part; of a sum, a term that differs from rank to rank."""
    if placement == P:
        return whole * (rank + 1) * 2 / (world_size * (world_size + 1))
    part = whole.chunk(world_size, placement.dim)[rank] if isinstance(placement, Shard) else whole
    return part.clone()


# How x and w are passed (True: transposed), and the call.
OPS: dict[str, tuple[bool, bool, Callable[..., Any]]] = {
    "mm": (False, False, lambda x, w, b: torch.mm(x, w)),
    "x @ w": (False, False, lambda x, w, b: x @ w),
    "addmm": (False, False, lambda x, w, b: torch.addmm(b, x, w)),
    "linear": (False, True, lambda x, w, b: functional.linear(x, w)),
    "linear, bias": (False, True, lambda x, w, b: functional.linear(x, w, b)),
    "einsum": (False, False, lambda x, w, b: torch.einsum("sk,kn->sn", x, w)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_every_pair(op: str) -> None:
    mesh = grid()
    rank, W = mesh.get_local_rank(), mesh.size()
    x_t, w_t, function = OPS[op]
    wrong: list[str] = []
    for of_x, of_w, of_y, told in CASES:
        torch.manual_seed(2)
        shapes = (12, 18), (18, 24), (24,)
        plain = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        summand = plain[2] if op in ("addmm", "linear, bias") else 0
        expected = plain[0] @ plain[1] + summand
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        locals_, given = [], []
        for t, p, turned in zip(plain, (of_x, of_w), (x_t, w_t), strict=False):
            whole, placed = (t.detach().t(), TRANSPOSED[p]) if turned else (t.detach(), p)
            locals_.append(own(whole, placed, rank, W).requires_grad_())
            given.append((placed, whole.contiguous()))
        b = distribute_tensor(plain[2].detach(), mesh, [R]).requires_grad_()

        def call(locals_: Any = locals_, given: Any = given, b: Any = b, out: Any = of_y) -> Any:
            x, w = (
                DTensor.from_local(t, mesh, [p], shape=whole.shape, stride=whole.stride())
                for t, (p, whole) in zip(locals_, given, strict=True)
            )
            return function(x, w, b).redistribute(mesh, [out])

        name = f"{op} of {of_x}, {of_w} to {of_y}"
        forward, y = moved(call)
        seed = distribute_tensor(weight, mesh, [of_y])
        backward, _ = moved(lambda y=y, seed=seed: y.backward(seed))
        wrong = check(wrong, name, f"{forward} | {backward}", told)
        close(y, expected, name)
        for mine, (p, _), of_plain, turned in zip(locals_, given, plain, (x_t, w_t), strict=False):
            theirs = of_plain.grad.t() if turned else of_plain.grad
            close(mine.grad, own(theirs, reduced(p), rank, W), name)
        if op in ("addmm", "linear, bias"):
            close(b.grad, plain[2].grad, name)
        count = counted(lambda f=call, s=seed: f().backward(s))
        wrong = check(wrong, f"{name}, counted", count, sum(map(str.isalpha, told)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stacked", [False, True])
def test_every_pair_beside_another_mesh_dim(stacked: bool) -> None:
    """Rows, or a stack, are cut along dp; one matrix of the stack on each rank is fused, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong: list[str] = []
    for of_x, of_w, of_y, told in CASES:
        if P in (of_x, of_w):
            continue
        torch.manual_seed(3)
        batch = (2,) if stacked else ()
        x, w = torch.randn(*batch, 16, 8), torch.randn(*batch, 8, 24)
        plain = [t.double().requires_grad_() for t in (x, w)]
        expected = plain[0] @ plain[1]
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()

        def placed(of: Any, dp: Any, stacked: bool = stacked) -> list[Any]:
            return [dp, Shard(of.dim + 1) if stacked and isinstance(of, Shard) else of]

        ours = [
            distribute_tensor(t.detach(), mesh, placed(of, dp)).requires_grad_()
            for t, of, dp in zip(plain, (of_x, of_w), (S0, S0 if stacked else R), strict=True)
        ]
        out = placed(of_y, S0)
        name = f"{of_x}, {of_w} to {of_y}"
        forward, y = moved(lambda ours=ours, out=out: (ours[0] @ ours[1]).redistribute(mesh, out))
        y.backward(distribute_tensor(weight, mesh, out))
        if len(forward) > least(of_x, of_w, of_y) + ((of_x, of_w, of_y) in ONE_MORE):
            wrong.append(f"{name}: {forward}")
        if told.split(" | ")[0] in ("R", "S", "G"):
            wrong = check(wrong, name, forward, told.split(" | ")[0])
        close(y, expected, name)
        for mine, theirs in zip(ours, plain, strict=True):
            close(mine.grad, theirs.grad, name)
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(2)
def test_explain_tells_all_candidates() -> None:
    mesh = grid()
    x = distribute_tensor(torch.randn(8, 8), mesh, [S0])
    w = distribute_tensor(torch.randn(8, 8), mesh, [S1])
    with weft.engine("host"):
        told = weft.explain(lambda: x @ w)
    (chosen,) = [d for d in told if d.candidates]
    taken = [line for line in chosen.candidates if line.endswith("taken")]
    assert len(taken) == 1 and "[S(0), S(0)] -> [S(1)] by all_gather_matmul: 10" in taken[0]
    assert any("moves the weight" in line for line in chosen.candidates)
    assert str(told).count("\n    ") == len(chosen.candidates)
    whole = x.redistribute(mesh, [R])
    with weft.engine("host"):
        told = weft.explain(lambda: functional.linear(whole, w))
    (chosen,) = [d for d in told if d.candidates]
    assert any("dim 0 of the first is not cut" in line for line in chosen.candidates)
    # Losses and norms: what they could be, and why a fused one is out.
    labels = distribute_tensor(torch.randint(8, (8,)), mesh, [R])

    def lines(function: Callable[..., Any], *args: Any) -> list[str]:
        return [line for d in weft.explain(lambda: function(*args)) for line in d.candidates]

    cut, rows = x.redistribute(mesh, [S1]), lines(functional.cross_entropy, x, labels)
    of_classes = lines(functional.cross_entropy, cut, labels)
    assert any("by vocab_parallel_cross_entropy: 10" in line for line in of_classes), of_classes
    assert any("by log_softmax, nll_loss: dearer" in line for line in of_classes), of_classes
    assert sum(line.endswith("taken") for line in of_classes) == 1
    assert any("vocab_parallel_cross_entropy: classes are not cut" in line for line in rows), rows
    assert any("[S(0), S(0)] -> [S(0)]: 0 us, taken" in line for line in rows), rows
    of_rows = lines(functional.layer_norm, x, (8,))
    assert "[S(0)] -> [S(0)]: 0 us, taken" in of_rows, of_rows
    assert lines(functional.rms_norm, cut, (8,)) == ["[R] -> [R]: 10 us, taken"]
    features = x.redistribute(mesh, [S1])
    told = weft.explain(lambda: features @ w.redistribute(mesh, [R]))
    (chosen,) = [d for d in told if d.candidates]
    assert any("dearer, " in line and " us against 0" in line for line in chosen.candidates)
