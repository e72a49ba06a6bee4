"""What `torch.distributed.tensor` 2.13 does wrong, does not have, or hangs in: it is right here.

Each line runs an expression of plain tensors on DTensors in every layout, and compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dtensors import close, ints, r, tensors_of
from torch.nn import functional

from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

RANKS = 3
Line = tuple[str, Callable[..., Any], list[torch.Tensor]]


def losses() -> list[Line]:
    """Mean-reduced losses, on shards of different sizes: means of means are no mean."""
    a, b, p = r(7, 2), r(7, 2), torch.rand(7, 2).double()
    names = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    lines: list[Line] = [(name, getattr(functional, name), [a, b]) for name in names]
    return [
        *lines,
        ("soft_margin", lambda x: functional.soft_margin_loss(x, (x > 0).to(x.dtype) * 2 - 1), [a]),
        ("bce", functional.binary_cross_entropy, [p, p.flip(0)]),
        ("bce logits", functional.binary_cross_entropy_with_logits, [a, p]),
        ("kl_div", lambda x, y: functional.kl_div(x, y, reduction="batchmean"), [a, p]),
        ("poisson_nll", functional.poisson_nll_loss, [a, p]),
        ("gaussian_nll", functional.gaussian_nll_loss, [a, b, p + 0.1]),
        ("cosine_embedding", functional.cosine_embedding_loss, [a, b, r(7).sign()]),
        ("margin_ranking", functional.margin_ranking_loss, [r(7), r(7), r(7).sign()]),
        ("hinge_embedding", functional.hinge_embedding_loss, [a, b.sign()]),
        ("triplet", functional.triplet_margin_loss, [a, b, r(7, 2)]),
        ("multi_margin", functional.multi_margin_loss, [a, ints(2, 7)]),
        (
            "nll weight",
            lambda x, t, w: functional.nll_loss(x, t, w.detach()),
            [a, ints(2, 7), torch.rand(2).double()],
        ),
        ("one row", functional.mse_loss, [a[:1], b[:1]]),
    ]


def scalars() -> list[Line]:
    """What is read as a number is the number of the whole tensor."""
    x = r(8)
    return [
        ("sum().item()", lambda t: torch.tensor(t.sum().item()), [x]),
        ("float(mean)", lambda t: torch.tensor(float(t.mean())), [x]),
        ("bool(any)", lambda t: torch.tensor(bool((t > 0).any())), [x]),
        ("int(count)", lambda t: torch.tensor(int((t > 0).sum())), [x]),
        ("tolist", lambda t: torch.tensor(t.cumsum(0).tolist()), [x]),
        ("allclose", lambda t, u: torch.tensor(torch.allclose(t, u)), [x, x + 1e-12]),
        ("not allclose", lambda t, u: torch.tensor(torch.allclose(t, u)), [x, x.flip(0)]),
        ("equal", lambda t, u: torch.tensor(torch.equal(t, u)), [x, x.clone()]),
        ("not equal", lambda t, u: torch.tensor(torch.equal(t, u)), [x, x.roll(1)]),
        ("nonzero scalar", lambda t: torch.tensor(t.sum().is_nonzero()), [x]),
    ]


def dynamic() -> list[Line]:
    """Results whose size depends on values."""
    x, n = r(5, 3), ints(4, 9)
    return [
        ("x[mask]", lambda t: t[t > 0], [x]),
        ("x[mask rows]", lambda t, m: t[m > 0], [x, r(5)]),
        ("masked_select", lambda t, m: torch.masked_select(t, m), [x, x > 0]),
        ("nonzero", lambda t: torch.nonzero(t > 0), [x]),
        ("nonzero tuple", lambda t: torch.nonzero(t > 0, as_tuple=True), [x]),
        ("argwhere", lambda t: torch.argwhere(t > 0), [x]),
        ("where", lambda t: torch.where(t > 0), [x]),
        ("unique", lambda t: torch.unique(t), [n]),
        (
            "unique all",
            lambda t: torch.unique(t, return_inverse=True, return_counts=True),
            [n],
        ),
        ("unique rows", lambda t: torch.unique(t, dim=0), [ints(2, 6, 2)]),
        ("unique_consecutive", lambda t: torch.unique_consecutive(t), [n]),
        ("bincount", lambda t: torch.bincount(t), [n]),
        ("repeat_interleave", lambda t, k: t.repeat_interleave(k, 0), [x, ints(3, 5)]),
        ("combinations", lambda t: torch.combinations(t), [r(4)]),
    ]


def extrema() -> list[Line]:
    """Some ranks have nothing to take the maximum of: no rank raises while the others wait."""
    few = r(2, 3)
    of_torch = torch.aminmax(torch.ones(2, requires_grad=True)).min.grad_fn
    has_gradient = of_torch is not None and "NotImplemented" not in of_torch.name()  # torch 2.11
    return [
        ("max", lambda t: t.max(), [few]),
        ("amax 0", lambda t: t.amax(0), [few]),
        ("amin all", lambda t: t.amin(), [few]),
        ("min 0", lambda t: t.min(0), [few]),
        ("argmax", lambda t: t.argmax(), [few]),
        ("argmin 0", lambda t: t.argmin(0), [few]),
        ("aminmax", lambda t: torch.aminmax(t if has_gradient else t.detach()), [few]),
        ("median", lambda t: t.median(), [few]),
        ("mode", lambda t: t.mode(0), [few]),
        ("quantile", lambda t: t.quantile(0.3, 0), [few]),
        ("logsumexp", lambda t: t.logsumexp(0), [few]),
        ("cummax", lambda t: t.cummax(0), [few]),
        ("kthvalue", lambda t: t.kthvalue(2, 0), [few]),
        ("var", lambda t: t.var(), [few]),
        ("amax of a number", lambda t: t.amax(0), [r()]),
        ("prod", lambda t: t.prod(0), [few]),
    ]


def ordered() -> list[Line]:
    """Ops along the sharded dim."""
    x = r(7, 3)
    return [
        ("sort", lambda t: t.sort(0), [x]),
        ("argsort", lambda t: t.argsort(0), [x]),
        ("topk", lambda t: t.topk(3, 0), [x]),
        ("cumsum", lambda t: t.cumsum(0), [x]),
        ("cumprod", lambda t: t.cumprod(0), [x]),
        ("flip", lambda t: t.flip(0), [x]),
        ("roll", lambda t: t.roll(2, 0), [x]),
        ("diff", lambda t: t.diff(dim=0), [x]),
        ("unfold", lambda t: t.unfold(0, 3, 2), [x]),
        ("searchsorted", torch.searchsorted, [r(5).sort().values, x]),
        ("isin", torch.isin, [ints(5, 6), ints(5, 3)]),
        ("histc", lambda t: torch.histc(t, 5, -2, 2), [x]),
        ("pad reflect", lambda t: functional.pad(t, (1, 1), "reflect"), [x]),
        ("pad replicate", lambda t: functional.pad(t[None], (2, 0), "replicate"), [x]),
        ("cdist", torch.cdist, [x, r(4, 3)]),
        ("bilinear", functional.bilinear, [r(4, 2), r(4, 3), r(5, 2, 3)]),
        ("renorm", lambda t: t.renorm(2, 0, 1.0), [x]),
        ("block_diag", torch.block_diag, [r(2, 3), r(1, 2)]),
        ("complex", lambda a, b: torch.complex(a, b).abs(), [x, r(7, 3)]),
        ("polar", lambda a, b: torch.view_as_real(torch.polar(a, b)), [x, r(7, 3)]),
        ("addbmm", torch.addbmm, [r(4, 2), r(3, 4, 5), r(3, 5, 2)]),
        ("einsum", lambda a, b: torch.einsum("bij,bjk->ki", a, b), [r(3, 4, 5), r(3, 5, 2)]),
        ("baddbmm", torch.baddbmm, [r(3, 4, 2), r(3, 4, 5), r(3, 5, 2)]),
        ("inverse", torch.linalg.inv, [r(5, 3, 3)]),
    ]


def indexed() -> list[Line]:
    """Scatter, gather, put, take: with the index, the source or the target sharded."""
    x, i = r(6, 4), ints(6, 5)
    src, grid = r(5, 4), ints(6, 5, 4)
    once = torch.stack([torch.randperm(6) for _ in range(4)], 1)
    some, images = torch.tensor([4, 1, 0, 5, 2]), r(3, 2, 6)

    def unpool(t: Any) -> Any:
        pooled, where = functional.max_pool1d(t, 2, return_indices=True)
        return functional.max_unpool1d(pooled, where, 2)

    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(t: Any, *rest: Any) -> Any:
            t = t.clone()
            function(t, *rest)
            return t

        return run

    return [
        ("gather", lambda t, j: t.gather(0, j), [x, grid]),
        ("take", lambda t, j: t.take(j), [x, ints(24, 3, 2)]),
        ("take_along_dim", lambda t, j: t.take_along_dim(j, 0), [x, grid]),
        ("index_select", lambda t, j: t.index_select(0, j), [x, i]),
        (
            "scatter",
            lambda t, j, s: t.scatter(0, j, s),
            [x, once, r(6, 4)],
        ),
        ("scatter_add", lambda t, j, s: t.scatter_add(0, j, s), [x, grid, src]),
        ("scatter_reduce", lambda t, j, s: t.scatter_reduce(0, j, s, "amax"), [x, grid, src]),
        ("index_add", lambda t, j, s: t.index_add(0, j, s), [x, i, src]),
        (
            "index_copy",
            lambda t, j, s: t.index_copy(0, j, s),
            [x, some, src],
        ),
        ("index_fill", lambda t, j: t.index_fill(0, j, 2.0), [x, i]),
        ("index_put", lambda t, j, s: t.index_put((j,), s, accumulate=True), [x, i, src]),
        ("put_", changed(lambda t, j, s: t.put_(j, s)), [x, torch.tensor([3, 9, 20]), r(3)]),
        ("x[i] = v", changed(lambda t, v: t.__setitem__(2, v)), [x, r(4)]),
        ("x[i] = 5.", changed(lambda t: t.__setitem__(0, 5.0)), [x]),
        ("x[:, i] = v", changed(lambda t, v: t.__setitem__((slice(None), 1), v)), [x, r(6)]),
        (
            "x[index] = v",
            changed(lambda t, j, v: t.__setitem__(j, v)),
            [x, some[2:4], r(2, 4)],
        ),
        ("x[mask] = v", changed(lambda t, v: t.__setitem__(t > 0, 0.5)), [x, r(1)]),
        ("masked_scatter", lambda t, m, s: t.masked_scatter(m, s), [x, x > 0, r(24)]),
        ("embedding_bag", lambda j, w: functional.embedding_bag(j, w), [ints(6, 3, 2), x]),
        (
            "max_unpool",
            unpool,
            [images],
        ),
    ]


def resized() -> list[Line]:
    """An out= without elements takes the shape of the result."""
    x, y = r(5, 3), r(5, 3)

    def into(function: Callable[..., Any], *outs: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            args = tuple(t.detach() for t in args)
            out = tuple(make(args[0]) for make in outs)
            result = function(*args, out=out if len(out) > 1 else out[0])
            return result, *out

        return run

    def nothing(t: Any) -> Any:
        return t.new_empty(0)

    def no_rows(t: Any) -> Any:
        return t[:0].clone()

    def integers(t: Any) -> Any:
        return t.new_empty(0, dtype=torch.int64)

    return [
        ("mul", into(torch.mul, nothing), [x, y]),
        ("mul, no rows", into(torch.mul, no_rows), [x, y]),
        ("sum", into(lambda t, out: torch.sum(t, 0, out=out), no_rows), [x]),
        ("sum of all", into(lambda t, out: torch.sum(t, (0, 1), out=out), no_rows), [x]),
        ("max", into(lambda t, out: torch.max(t, 1, out=out), nothing, integers), [x]),
        ("mm", into(lambda a, b, out: torch.mm(a, b.t(), out=out), no_rows), [x, y]),
        ("cat", into(lambda a, b, out: torch.cat([a, b], 1, out=out), nothing), [x, y]),
        ("half", into(torch.exp, lambda t: t.new_empty(0, dtype=torch.float16)), [x]),
        ("nothing", into(lambda t, out: torch.exp(t[:0], out=out), nothing), [x]),
        # Torch makes a tensor of its own for the indices, and the status.
        ("msort", into(torch.msort, nothing), [x]),
        ("inv", into(lambda t, out: torch.linalg.inv(t[:3], out=out), nothing), [x]),
        (
            "split",
            into(
                lambda t, out: torch.split_with_sizes_copy(t, [2, 3], out=list(out)),
                lambda t: torch.empty_like(t[:2]),
                lambda t: torch.empty_like(t[:3]),
            ),
            [x],
        ),
        (
            "linear",
            into(lambda a, b, out: functional.linear(a, b, out=out), lambda t: t.new_empty(5, 5)),
            [x, y],
        ),
    ]


TABLES = {f.__name__: f for f in (losses, scalars, dynamic, extrema, ordered, indexed, resized)}


def results(function: Callable[..., Any], args: list[Any]) -> tuple[list[Any], list[Any]]:
    """What the function gives, and the gradients of its sum."""
    got = tensors_of(function(*args))
    sums = [t.sum() for t in got if t.requires_grad]
    wanted = [t for t in args if t.requires_grad]
    return got, list(torch.autograd.grad(sums, wanted, allow_unused=True)) if sums else []


def placements_of(tensor: torch.Tensor) -> list[Any]:
    every: list[Any] = [Replicate(), *(Shard(d) for d in range(tensor.ndim))]
    return [*every, Partial()] if tensor.is_floating_point() else every


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("table", TABLES)
def test_right_where_torch_is_not(table: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    wrong = []
    for name, function, args in TABLES[table]():
        plain = [t.clone().requires_grad_(t.is_floating_point()) for t in args]
        expected, grads = results(function, plain)
        every = list(itertools.product(*map(placements_of, args)))
        for placements in every[:: max(1, len(every) // 7)]:
            ours = [
                distribute_tensor(t.detach(), mesh, [p]).requires_grad_(t.requires_grad)
                for t, p in zip(plain, placements, strict=True)
            ]
            label = f"{name} {placements}"
            try:
                got, got_grads = results(function, ours)
            except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
                wrong.append(f"{label}: {error}")
                continue
            if len(got) != len(expected) or not all(map(close, got, expected)):
                wrong.append(label)
            for mine, theirs in zip(got_grads, grads, strict=True):
                zero = theirs is None or not theirs.any()
                if not (zero if mine is None else theirs is not None and close(mine, theirs)):
                    wrong.append(f"{label}: gradient")
    assert wrong == []


def refusals() -> list[Line]:
    """Values that an op refuses, though only one rank may see them."""
    x, lists = r(4, 3), []
    for wrong in (7, -7):
        i = torch.tensor([0, wrong, 1, 2])
        rows = i[:, None].expand(4, 3).contiguous()
        lists += [
            ("gather", lambda t, j: t.gather(0, j), [x, rows]),
            ("one_hot", lambda j: functional.one_hot(j, 5), [i]),
            ("index_select", lambda t, j: t.index_select(0, j), [x, i]),
            ("x[i]", lambda t, j: t[j], [x, i]),
            ("take", lambda t, j: t.take(j * 9), [x, i]),
            ("embedding", lambda t, j: functional.embedding(j, t), [x, i]),
            ("cross entropy", functional.cross_entropy, [x, i]),
            ("scatter_add", lambda t, j: t.scatter_add(0, j, t), [x, rows]),
            ("index_add", lambda t, j: t.index_add(0, j, t), [x, i]),
            ("index_copy", lambda t, j: t.index_copy(0, j, t), [x, i]),
            ("x[i] = 2", lambda t, j: t.clone().__setitem__(j, 2.0), [x, i]),
        ]
    return [
        *lists,
        ("one_hot below zero", lambda j: functional.one_hot(j), [torch.tensor([2, -1, 0])]),
        ("cat of numbers", lambda t, u: torch.cat([t, u]), [r(), r()]),
        ("argmax of nothing", lambda t: t.argmax(), [r(0)]),
        ("amax of nothing", lambda t: t.amax(0), [r(0, 3)]),
        ("var of integers", lambda j: j.var(), [ints(5, 4)]),
        ("std of booleans", lambda j: j.std(0), [ints(2, 4, 3) > 0]),
        ("norm", lambda t: functional.instance_norm(t, use_input_stats=False), [r(4, 2, 3)]),
        ("padding", lambda t, j: functional.embedding(j, t, padding_idx=4), [x, ints(4, 5)]),
    ]


@pytest.mark.ranks(RANKS)
def test_wrong_values_are_refused_as_by_torch() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    wrong = []
    for name, function, args in refusals():
        with pytest.raises((RuntimeError, IndexError, AssertionError)) as of_torch:
            function(*args)
        for placements in itertools.product(*map(placements_of, args)):
            ours = [distribute_tensor(t, mesh, [p]) for t, p in zip(args, placements, strict=True)]
            try:
                function(*ours)
            except (RuntimeError, IndexError, AssertionError) as error:
                if type(error) is of_torch.type:
                    continue
                wrong.append(f"{name} {placements}: {error!r} is no {of_torch.type.__name__}")
            else:
                wrong.append(f"{name} {placements}: nothing is raised")
    assert wrong == []


@pytest.mark.ranks(RANKS)
def test_one_hot_of_a_sum() -> None:
    """A one in the place of each term is no term of a one."""
    mesh = init_device_mesh("cpu", (RANKS,))
    index = torch.tensor([[0, 3], [2, 1]])
    terms = index * (RANKS if mesh.get_rank() == 0 else -1)
    terms[1] = index[1] if mesh.get_rank() == 1 else 0
    ours = DTensor.from_local(terms, mesh, [Partial()])
    for classes in (-1, 6):
        assert close(functional.one_hot(ours, classes), functional.one_hot(index, classes))


@pytest.mark.ranks(RANKS)
def test_dtype_of_the_statistics_of_norms() -> None:
    """They have the dtype that torch gives them on a CPU: it depends on that of the weights."""
    mesh = init_device_mesh("cpu", (RANKS,))
    half, single = torch.float16, torch.float32

    def copied(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.clone()

    def spread(t: torch.Tensor | None) -> torch.Tensor | None:
        placement = Shard(0) if t is not None and t.ndim > 1 else Replicate()
        return None if t is None else distribute_tensor(t.clone(), mesh, [placement])

    for dtype, of_weights in ((half, half), (half, single), (single, single)):
        x, ones = torch.randn(4, 3).to(dtype), torch.ones(3, dtype=of_weights)
        for w, s in ((ones, ones), (ones, None), (None, ones), (None, None)):
            pairs = [
                [torch.native_layer_norm(on(x), [3], on(w), on(w), 1e-5)]
                + [
                    torch.native_batch_norm(on(x), on(w), on(w), on(s), on(s), training, 0.1, 1e-5)
                    for training in (True, False)
                    if training or s is not None
                ]
                for on in (spread, copied)
            ]
            for ours, theirs in zip(*pairs, strict=True):
                for mine, other in zip(ours, theirs, strict=True):
                    assert mine.dtype == mine.to_local().dtype == other.dtype
                    assert mine.shape == other.shape
                torch.testing.assert_close(ours[0].full_tensor(), theirs[0], rtol=0, atol=0.01)
    x, ones = torch.randn(4, 3), torch.ones(3)
    for training in (True, False):
        functional_norm = torch.ops.aten._native_batch_norm_legit_functional
        found, expected = (
            functional_norm(on(x), *map(on, [ones] * 4), training, 0.1, 1e-5)
            for on in (spread, copied)
        )
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.full_tensor(), other)
