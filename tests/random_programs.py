"""Random programs: chains of ops on DTensors, in random layouts, beside the same on plain tensors.

A program is a list of `program_steps`. Those that plain torch refuses are left out when a program
is made. All values are compared, those written through views too, and all gradients, some of them
differentiated again. The ranks are virtual: a program takes 50 ms.

    python tests/random_programs.py 1000 2000     # more of them, and what differs
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from program_steps import STEPS, Step, any_placement, is_inexact

from weft import sim
from weft.dtensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

MESHES = [(2,), (3,), (4,), (2, 2), (1, 3)]
_MAX_VALUE, _MAX_NUMEL = 1e4, 3000
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AttributeError, ZeroDivisionError)


@dataclass
class Program:
    """Inputs, and steps as (function, positions of its operands, seed)."""

    inputs: list[torch.Tensor]
    steps: list[tuple[Step, list[int], int]]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """All values, the inputs first."""
        pool = list(inputs)
        for function, operands, seed in self.steps:
            made = function(random.Random(seed), *(pool[i] for i in operands))
            pool += made if isinstance(made, (list, tuple)) else [made]
        return pool


def drawn_inputs(rng: random.Random) -> list[torch.Tensor]:
    """Tensors that fit each other more often than not."""
    draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
    base = [rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 8]) for _ in range(rng.choice([1, 2, 2, 3]))]
    inputs = []
    for _ in range(3):
        shape = rng.choice(
            [base, base, base[1:], [n if rng.random() < 0.5 else 1 for n in base], []]
        )
        dtype = rng.choice(
            [torch.float64] * 6 + [torch.float32, torch.complex128, torch.int64, torch.bool]
        )
        if dtype in (torch.int64, torch.bool):
            inputs.append(torch.randint(-3, 6, shape, generator=draw).to(dtype))
        else:
            x = torch.randn(shape, generator=draw, dtype=dtype)
            inputs.append(x.requires_grad_(rng.random() < 0.7))
    return inputs


def fresh(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def fits(made: Any) -> bool:
    values = made if isinstance(made, (list, tuple)) else [made]
    return all(
        isinstance(v, torch.Tensor)
        and v.ndim < 6
        and v.numel() < _MAX_NUMEL
        and bool((v.detach().abs() < _MAX_VALUE).all() if v.dtype != torch.bool else True)
        for v in values
    )


def drawn_program(seed: int) -> Program:
    """A program that plain torch runs."""
    rng = random.Random(seed)
    program = Program(drawn_inputs(rng), [])
    pool: list[Any] = fresh(program.inputs)
    weights = [often for _, often in STEPS.values()]
    for _ in range(rng.randrange(8, 40)):
        function = rng.choices(list(STEPS), weights)[0]
        operands = [
            rng.randrange(rng.choice([0, max(0, len(pool) - 3)]), len(pool))
            for _ in range(STEPS[function][0])
        ]
        step = function, operands, rng.randrange(1 << 30)
        try:
            made = function(random.Random(step[2]), *(pool[i] for i in operands))
        except REFUSALS:
            continue
        if fits(made):
            pool += made if isinstance(made, (list, tuple)) else [made]
            program.steps.append(step)
    return program


def spread(x: torch.Tensor, mesh: Any, rng: random.Random) -> DTensor:
    """`x` in a random layout, a leaf; the terms of a sum differ from rank to rank."""
    placements = [any_placement(rng, x, sums=True) for _ in range(mesh.ndim)]
    solid = [Replicate() if isinstance(p, Partial) else p for p in placements]
    made = distribute_tensor(x.detach(), mesh, solid, src_data_rank=None)
    local = made.to_local()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            size, here = mesh.shape[dim], mesh.get_local_rank(dim)
            total = size if placement.reduce_op == "avg" else 1
            local = local * (total - 2 * (size - 1) if here == 0 else 2)
    shape, stride = tuple(x.shape), made.stride()
    made = DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    return made.requires_grad_(x.requires_grad)


def is_leaf(t: Any) -> bool | None:
    """None where torch refuses to tell: of one of several views, of what has been written since."""
    try:
        return bool(t.is_leaf)
    except RuntimeError:
        return None


def gradients(pool: list[Any], roots: list[int], seed: int, mesh: Any) -> list[Any]:
    """Of the values at `roots`, by all leaves; of their squares again for every fifth program."""
    leaves = [t for t in pool if t.requires_grad and is_leaf(t)]
    if not roots or not leaves:
        return []
    draw, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    values = [pool[i] for i in roots]
    weights: list[Any] = [
        torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.dtype) for t in values
    ]
    if mesh is not None:
        weights = [spread(w, mesh, rng) for w in weights]
    twice = seed % 5 == 0
    found = list(
        torch.autograd.grad(
            values, leaves, weights, retain_graph=True, allow_unused=True, create_graph=twice
        )
    )
    squares = [g.abs().square().sum().double() for g in found if g is not None and g.requires_grad]
    if twice and squares:
        again = torch.autograd.grad(sum(squares), leaves, retain_graph=True, allow_unused=True)
        return found + list(again)
    return found + [None] * len(leaves) * twice


def plain_gradients_of(pool: list[Any], seed: int) -> tuple[list[int], list[Any]]:
    """The values that plain torch takes gradients of, and these."""

    def taken(roots: list[int]) -> list[Any] | None:
        try:
            return gradients(pool, roots, seed, None)
        except REFUSALS:  # a value that is needed was written, say
            return None

    roots = [i for i, t in enumerate(pool) if t.requires_grad and is_leaf(t) is False]
    found = taken(roots)
    if found is None:
        roots = [i for i in roots if taken([i]) is not None]
        found = taken(roots)
    return (roots, found) if found is not None else ([], [])


def differs(ours: Any, theirs: Any, tolerance: float) -> str | None:
    """Why `ours` is not `theirs`. No gradient is one of zeros."""
    if ours is None or theirs is None:
        given = theirs if ours is None else ours.detach().full_tensor()
        zero = given is None or not (given.abs() > 1e-12).any()
        return None if zero else f"{ours} is not {theirs}"
    full = ours.detach().full_tensor()
    kinds = (ours.shape, ours.dtype, full.shape, full.dtype)
    if kinds != (theirs.shape, theirs.dtype) * 2:
        return f"{kinds} is not {theirs.dtype} {list(theirs.shape)}"
    theirs = theirs.detach()
    if not is_inexact(theirs):
        return None if torch.equal(full, theirs) else f"{full} is not {theirs}"
    finite = theirs[theirs.isfinite()].abs()
    scale = max(0.1, float(finite.max()) if finite.numel() else 1.0)
    close = torch.allclose(full, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return None if close else f"{full} is not {theirs}"


def compare(seed: int, mesh_shape: tuple[int, ...]) -> list[str]:
    """What differs from plain torch on any rank."""
    program = drawn_program(seed)
    try:
        plain = program.run(fresh(program.inputs))
    except REFUSALS:  # a step that is left out had written something before it was refused
        return []
    roots, plain_gradients = plain_gradients_of(plain, seed)
    finite = [g for g in plain_gradients if isinstance(g, torch.Tensor)]
    if not all(bool((g.detach().abs() < _MAX_VALUE**2).all()) for g in finite):
        roots, plain_gradients = [], []  # too near to a pole
    rough = any(t.dtype in (torch.float32, torch.complex64) for t in plain)

    def body(rank: int) -> list[str]:
        mesh, rng = init_device_mesh("cpu", mesh_shape), random.Random(seed)
        ours = program.run([spread(x, mesh, rng) for x in program.inputs])
        wrong = [
            f"value {i}: {why}"
            for i, (mine, theirs) in enumerate(zip(ours, plain, strict=True))
            if (why := differs(mine, theirs, 2e-3 if rough else 1e-7))
            or (why := "grad" if mine.requires_grad != theirs.requires_grad else None)
        ]
        pairs = zip(gradients(ours, roots, seed, mesh), plain_gradients, strict=True)
        return wrong + [
            f"gradient {i}: {why}"
            for i, pair in enumerate(pairs)
            if (why := differs(*pair, 5e-3 if rough else 1e-7))
        ]

    found = sim.run(math.prod(mesh_shape), body, races=False)
    names = [f"{function.__name__}{at}" for function, at, _ in program.steps]
    wrong: list[str] = next(filter(None, found), [])
    return [f"{seed} on {mesh_shape}, {names}: {why}" for why in wrong]


def check(seeds: Sequence[int]) -> list[str]:
    wrong = []
    for seed in seeds:
        mesh_shape = MESHES[seed % len(MESHES)]
        try:
            wrong += compare(seed, mesh_shape)
        except REFUSALS as error:
            text = " ".join(str(error).split())[:400]
            wrong.append(f"{seed} on {mesh_shape}: {type(error).__name__}: {text}")
    return wrong


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:3])):
        for line in check([number]):
            print(line)
