"""Torch's own database of ops, run on DTensors beside plain tensors: what is right, what is not.

    python tests/opinfo.py                      every op: a table by family, and a total
    python tests/opinfo.py --only linalg -v     the ops whose name has "linalg" in it, each reason
    python tests/opinfo.py --dtype int64        of integers, not of float32

Every op variant of `op_db` that takes the dtype is run on sample inputs of the database, forward
and gradients, on virtual ranks (`weft.sim`), with its tensors placed as R, S(0), S(-1), Partial,
and each at random. It is

    right   every sample in every layout gives what plain torch gives, on all ranks
    error   some sample raises, alike on all ranks
    hang    some rank raises alone, and leaves the others waiting; or the process dies
    random  the numbers are random, and others than one process draws with the same seed
    wrong   some number, shape or dtype differs
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.multiprocessing as mp
from dtensors import full_of
from rank_pool import RankError, RankPool
from torch.utils._pytree import tree_leaves, tree_map_only

LAYOUTS = ("R", "S(0)", "S(-1)", "P", "mixed")
MESHES = {"4": (4,), "2x2": (2, 2)}
VERDICTS = ("right", "error", "hang", "random", "wrong")  # from good to bad
EXCLUDED = {
    # They read the memory around the tensor that they are given, which a DTensor has not.
    "as_strided_partial_views",
}
_UNSPECIFIED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)
_TOLERANCE = 2e-4  # four times the rounding of dtypes that are coarser than that
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_SECONDS_PER_OP = 100


@dataclass
class Result:
    """What one op variant did. `runs` counts its verdicts over (sample, layout)."""

    name: str
    family: str
    verdict: str
    runs: dict[str, int]
    reasons: dict[str, str] = field(default_factory=dict)  # per bad verdict, its first case


@cache
def op_variants(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The op variants of the database that take `dtype` on CPU, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {
        op.formatted_name: op
        for op in op_db
        if dtype in op.supported_dtypes("cpu") and op.formatted_name not in EXCLUDED
    }


class Task(NamedTuple):
    """An op variant to be checked, by its name."""

    name: str
    n_samples: int
    mesh_shape: tuple[int, ...] = (4,)
    dtype: torch.dtype = torch.float32

    @property
    def op(self) -> Any:
        """The op variant."""
        return op_variants(self.dtype)[self.name]

    def result(self, verdict: str, reason: str = "") -> Result:
        """What is known where no case was run to its end."""
        return Result(self.name, family_of(self.op), verdict, {}, {verdict: reason})


def family_of(op: Any) -> str:
    """The part of torch that an op belongs to."""
    name = op.name
    for prefix in ("linalg", "fft", "nn.functional", "masked", "special", "signal", "sparse"):
        if name.startswith(prefix):
            return str(prefix)
    kind = type(op).__name__
    kinds = {"UnaryUfuncInfo": "pointwise", "BinaryUfuncInfo": "pointwise"}
    return kinds.get(kind, {"ReductionOpInfo": "reductions"}.get(kind, "others"))


def spread(tensor: torch.Tensor, layout: str, mesh: Any, rng: random.Random) -> Any:
    """`tensor` as a leaf DTensor. Terms of a sum differ, and add up exactly in rank order.

    Those of integers wrap around.
    """
    from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    plain = tensor.detach()
    fractions = plain.is_floating_point() or plain.is_complex()
    placements: list[Any] = []
    for dim in range(mesh.ndim):
        kind = layout
        if layout == "mixed":
            kind = rng.choice(["R", *(f"S({d})" for d in range(plain.ndim)), "P"])
        if kind.startswith("S") and plain.ndim:
            placements.append(Shard(int(kind[2:-1]) % plain.ndim))
        elif kind == "P" and plain.dtype != torch.bool and dim == 0:
            placements.append(Partial())
        else:
            placements.append(Replicate())
    if placements[0] != Partial() or not bool(plain.isfinite().all()):
        made = distribute_tensor(plain, mesh, placements, src_data_rank=None)
        return made.requires_grad_(tensor.requires_grad)
    whole = distribute_tensor(plain, mesh, [Replicate(), *placements[1:]], src_data_rank=None)
    weights = (0.5, 0.5, -0.5, 0.5) if fractions else (2, -1, -1, 1)
    term = whole.to_local() * weights[mesh.get_local_rank(0)]
    shape, stride = tuple(plain.shape), plain.stride()
    made = DTensor.from_local(term, mesh, placements, shape=shape, stride=stride)
    return made.requires_grad_(tensor.requires_grad)


def differs(ours: Any, theirs: Any, what: str, noise: float = 0.0) -> str | None:
    """Why `ours` is not `theirs`, up to a few times the `noise` of theirs; None where it is."""

    if not isinstance(theirs, torch.Tensor):
        same = type(ours) is type(theirs) and (ours == theirs or ours != ours)
        return None if same else f"{what}: {ours!r}, not {theirs!r}"
    if not isinstance(ours, torch.Tensor):
        return f"{what}: {type(ours).__name__}, not a tensor"
    full = full_of(ours.detach())
    if full.dtype != theirs.dtype or full.shape != theirs.shape:
        kinds = f"{full.dtype} {list(full.shape)}, not {theirs.dtype} {list(theirs.shape)}"
        return f"{what}: {kinds}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{what}: says {list(ours.shape)}, is {list(full.shape)}"
    theirs = theirs.detach()
    if theirs.layout != torch.strided or full.layout != torch.strided:
        full, theirs = full.to_dense(), theirs.to_dense()
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return None if torch.equal(full, theirs) else f"{what}: {_worst(full, theirs)}"
    finite = theirs[theirs.isfinite()]
    scale = max(float(finite.abs().max()) if finite.numel() else 1.0, 0.01)
    rtol = max(_TOLERANCE, 4 * torch.finfo(theirs.dtype).eps)
    atol = rtol * scale + 4 * noise
    close = torch.allclose(full, theirs, rtol=rtol, atol=atol, equal_nan=True)
    return None if close else f"{what}: {_worst(full, theirs)}"


def _worst(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    apart = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    a, b = ours[apart], theirs[apart]
    return f"{a[:3].tolist()}, not {b[:3].tolist()}, in {a.numel()} of {ours.numel()} elements"


def call(op: Any, sample: Any, seed: int) -> list[Any]:
    """The op's results, those that are compared."""
    torch.manual_seed(seed)
    result = op(sample.input, *sample.args, **sample.kwargs)
    found = tree_leaves(sample.output_process_fn_grad(result))
    if op.name in _UNSPECIFIED:
        for tensor in found:
            tensor.detach().zero_()
    return found


def gradients(outputs: list[Any], inputs: list[Any], layout: str, mesh: Any) -> list[Any]:
    """Of all outputs, weighed by random numbers, with respect to the inputs."""
    from weft.dtensor import DTensor

    roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not roots or not wanted:
        return []
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=rng, dtype=torch.float64).to(t.dtype) for t in roots]
    if isinstance(roots[0], DTensor):
        chooser = random.Random(0)
        weights = [spread(w, layout, mesh, chooser) for w in weights]
    return list(torch.autograd.grad(roots, wanted, weights, allow_unused=True))


def remade(sample: Any, change: Callable[[torch.Tensor], Any]) -> tuple[Any, list[Any]]:
    """The sample with its tensors changed, and its arguments in a list."""
    everything = [sample.input, sample.args, sample.kwargs]
    value, args, kwargs = tree_map_only(torch.Tensor, change, everything)
    made = type(sample)(
        value,
        args=tuple(args),
        kwargs=kwargs,
        output_process_fn_grad=sample.output_process_fn_grad,
    )
    return made, tree_leaves([value, args, kwargs])


def copied(sample: Any) -> tuple[Any, list[Any]]:
    """An op may write its arguments, which other samples may share: running means, say."""
    return remade(sample, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def _is_random(op: Any, sample: Any) -> bool:
    pairs = zip(*(call(op, copied(sample)[0], seed) for seed in (1, 2)), strict=True)
    return any(differs(a, b, "") is not None for a, b in pairs)


@dataclass
class Expected:
    """What plain torch gives for one sample, and how far each gradient is from float64's.

    Where a gradient is a small difference of large terms, that is more than the tolerance.
    """

    outputs: list[Any]
    gradients: list[Any]
    at_random: bool
    noise: list[float]


def expect(op: Any, sample: Any) -> Expected | None:
    """Run plain torch; None where it refuses the sample itself."""
    try:
        own, tensors = copied(sample)
        outputs = call(op, own, 0)
        at_random = _is_random(op, sample)
        found = gradients(outputs, tensors, "", None)
    except Exception:  # of whatever kind: the sample is not for this machine
        return None
    noise = [0.0] * len(found) if at_random else _noise(op, sample, found)
    return Expected(outputs, found, at_random, noise)


def _noise(op: Any, sample: Any, found: list[Any]) -> list[float]:
    """The largest error of each gradient; 0 where the op does not take float64."""

    def wider(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _WIDER:
            return tensor
        return tensor.detach().to(_WIDER[tensor.dtype]).requires_grad_(tensor.requires_grad)

    exact_sample, tensors = remade(copied(sample)[0], wider)
    try:
        outputs = call(op, exact_sample, 0)
        exact = gradients(outputs, tensors, "", None)
    except Exception:  # as in `expect`
        exact = []
    if len(exact) != len(found):
        return [0.0] * len(found)
    return [_error(each, other) for each, other in zip(found, exact, strict=True)]


def _error(found: torch.Tensor | None, exact: torch.Tensor | None) -> float:
    if found is None or exact is None or found.shape != exact.shape or not found.numel():
        return 0.0
    if found.layout != torch.strided or not bool(exact.isfinite().all()):
        return 0.0
    return float((found - exact).abs().max())


def check(op: Any, sample: Any, expected: Expected, layout: str, mesh: Any) -> tuple[str, str]:
    """(verdict, reason) of one sample in one layout."""
    rng = random.Random(zlib.crc32(op.formatted_name.encode()))
    try:
        ours, inputs = remade(sample, lambda t: spread(t, layout, mesh, rng))
        got = call(op, ours, 0)
        reason = compare(got, expected.outputs, "result")
        got_gradients = gradients(got, inputs, layout, mesh)
        of_gradients = compare(got_gradients, expected.gradients, "gradient", expected.noise)
        reason = reason or of_gradients
    except Exception as error:  # whatever an op raises is what is counted here
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:400]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return "error", f"{type(error).__name__}: {text} ({where})"
    if reason is None:
        return "right", ""
    return "random" if expected.at_random else "wrong", reason


def compare(
    ours: list[Any], theirs: list[Any], what: str, noise: Sequence[float] = ()
) -> str | None:
    """The first difference of two lists of results. A gradient of zeros may be given as none.

    All are compared, also where one differs, as that gathers them from the ranks.
    """
    if len(ours) != len(theirs):
        return f"{len(ours)} {what}s, not {len(theirs)}"
    found: list[str | None] = []
    for i, (o, e) in enumerate(zip(ours, theirs, strict=True)):
        if what == "gradient" and (o is None or e is None):
            given = o if e is None else e
            zero = given is None or bool((given == 0).all())
            found.append(None if zero else f"gradient {i} is {'missing' if o is None else 'there'}")
        else:
            found.append(differs(o, e, f"{what} {i}", noise[i] if noise else 0.0))
    return next((reason for reason in found if reason), None)


def samples_of(task: Task) -> list[Any]:
    """Some of the database's sample inputs, from the first to the last; equal on all ranks."""
    torch.manual_seed(0)
    random.seed(0)
    op, dtype = task.op, task.dtype
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))
    return samples[:: max(1, -(-len(samples) // task.n_samples))]


def check_op(task: Task) -> Result:
    """Every sample in every layout; where the ranks part, each case by itself."""
    op, mesh_shape = task.op, task.mesh_shape
    samples = samples_of(task)
    expected = [expect(op, sample) for sample in samples]
    cases = [
        (sample, wanted, layout)
        for sample, wanted in zip(samples, expected, strict=True)
        if wanted is not None
        for layout in LAYOUTS
    ]
    found = run_on_ranks(op, cases, mesh_shape)
    if found is None:
        found = [one for case in cases for one in run_on_ranks(op, [case], mesh_shape) or [_APART]]
    runs: Counter[str] = Counter(verdict for verdict, _ in found)
    reasons: dict[str, str] = {}
    for (verdict, reason), (sample, _, layout) in zip(found, cases, strict=True):
        if verdict != "right":
            reasons.setdefault(verdict, f"{layout} {sample.summary()}"[:250] + f": {reason}")
    verdict = max(runs, key=VERDICTS.index, default="skipped")
    return Result(task.name, family_of(op), verdict, dict(runs), reasons)


_APART = ("hang", "the ranks part: some raise, and others wait for them")
Case = tuple[Any, Expected, str]


def run_on_ranks(
    op: Any, cases: list[Case], mesh_shape: tuple[int, ...]
) -> list[tuple[str, str]] | None:
    """What the ranks find, if they agree on what is right and what raises."""
    from weft import sim
    from weft.dtensor import init_device_mesh

    def body(rank: int) -> list[tuple[str, str]]:
        mesh = init_device_mesh("cpu", mesh_shape)
        return [check(op, sample, wanted, layout, mesh) for sample, wanted, layout in cases]

    try:
        per_rank = sim.run(math.prod(mesh_shape), body, races=False, timeout=_SECONDS_PER_OP)
    except sim.SimError:
        return None
    found = []
    for verdicts in zip(*per_rank, strict=True):
        kinds = {verdict for verdict, _ in verdicts}
        if "error" in kinds and len(kinds) > 1:
            return None
        found.append(max(verdicts, key=lambda one: VERDICTS.index(one[0])))
    return found


def check_on_processes(task: Task) -> Result:
    """`check_op` on a real process a rank: on threads, a lock of Python may keep ranks apart."""
    pool = RankPool(math.prod(task.mesh_shape))
    try:
        found = pool.run(check_on_rank, task, timeout_s=_SECONDS_PER_OP)
    except RankError as error:
        return task.result("hang", " ".join(str(error).split())[:400])
    finally:
        if pool.alive:
            pool.close()
    worst = [max(one, key=lambda v: VERDICTS.index(v[0])) for one in zip(*found, strict=True)]
    runs = Counter(verdict for verdict, _ in worst)
    reasons = {verdict: reason for verdict, reason in worst if verdict != "right"}
    verdict = max(runs, key=VERDICTS.index, default="skipped")
    return Result(task.name, family_of(task.op), verdict, dict(runs), reasons)


def check_on_rank(task: Task) -> list[tuple[str, str]]:
    """Every case of an op, on one rank of a pool."""
    from weft.dtensor import init_device_mesh

    mesh = init_device_mesh("cpu", task.mesh_shape)
    return [
        check(task.op, sample, wanted, layout, mesh)
        for sample in samples_of(task)
        if (wanted := expect(task.op, sample)) is not None
        for layout in LAYOUTS
    ]


def _work(pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        try:
            pipe.send(check_op(task))
        except TimeoutError as error:
            result = task.result("hang", str(error)[:400])
            result.runs["hang"] = 1  # to be run again, on processes
            pipe.send(result)
        except Exception as error:  # a sample that cannot be made, say
            reason = " ".join(traceback.format_exc().split())[-400:]
            pipe.send(task.result("error", f"{error}: {reason}"))


class Worker:
    """A process that checks ops, and is started again when one of them kills it."""

    def __init__(self) -> None:
        self.busy: Task | None = None
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, task: Task) -> None:
        self.busy = task
        self.pipe.send(task)

    def result(self) -> Result:
        assert self.busy is not None
        task, self.busy = self.busy, None
        try:
            return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            self.process.join()
            reason = f"the process died, exit code {self.process.exitcode}"
            self._start()
            return task.result("hang", reason)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def count(tasks: Sequence[Task], jobs: int, show: Any = None) -> list[Result]:
    """Check the op variants in `jobs` processes."""
    workers = [Worker() for _ in range(min(jobs, len(tasks)))]
    waiting = list(reversed(tasks))
    results: dict[str, Result] = {}
    while len(results) < len(tasks):
        for worker in workers:
            if worker.busy is None and waiting:
                worker.send(waiting.pop())
        ready = wait([w.pipe for w in workers if w.busy])
        for worker in workers:
            if worker.pipe in ready:
                result = worker.result()
                results[result.name] = result
                if show is not None:
                    show(result)
    for worker in workers:
        worker.close()
    for task in tasks:
        result = results[task.name]
        if result.verdict == "hang" and result.runs:
            results[task.name] = check_on_processes(task)
    return [results[task.name] for task in tasks]


def table(results: list[Result]) -> Any:
    """Verdicts by family."""
    from rich.table import Table

    columns = [v for v in (*VERDICTS, "skipped") if any(r.verdict == v for r in results)]
    shown = Table("family", *columns, "of", title="op variants")
    families = sorted({r.family for r in results})
    for family in [*families, "all"]:
        row = Counter(r.verdict for r in results if family in (r.family, "all"))
        cells = [str(row[c] or "") for c in columns]
        shown.add_row(family, *cells, str(sum(row.values())), end_section=family == families[-1])
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print, and write the results as JSON."""
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of ops")
    parser.add_argument("--dtype", default="float32", help="of the samples (default: float32)")
    parser.add_argument("--samples", type=int, default=5, help="sample inputs an op (default: 5)")
    parser.add_argument("--mesh", choices=MESHES, default="4", help="shape (default: 4)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--again", type=Path, help="only what was not right in this JSON file")
    parser.add_argument("-v", "--verbose", action="store_true", help="each reason, as it is found")
    options = parser.parse_args(argv)
    dtype = getattr(torch, options.dtype)
    names = [
        name
        for name in op_variants(dtype)
        if not options.only or any(o in name for o in options.only)
    ]
    if options.again:
        bad = [r["name"] for r in json.loads(options.again.read_text()) if r["verdict"] != "right"]
        names = [name for name in names if name in bad]
    tasks = [Task(name, options.samples, MESHES[options.mesh], dtype) for name in names]
    console = Console()
    started = time.monotonic()
    with Progress(console=console, redirect_stdout=False) as progress:
        task = progress.add_task("", total=len(tasks))

        seen: list[Result] = []

        def show(result: Result) -> None:
            seen.append(result)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps([asdict(r) for r in seen], indent=1) + "\n")
            progress.update(task, advance=1, description=result.name[:36].ljust(36))
            if options.verbose and result.verdict not in ("right", "skipped"):
                console.print(f"{result.name}: {result.runs}", highlight=False)
                for verdict, reason in result.reasons.items():
                    console.print(f"   {verdict}: {reason}", highlight=False, markup=False)

        results = count(tasks, options.jobs, show)
    console.print(table(results))
    console.print(f"{time.monotonic() - started:.0f} s, torch {torch.__version__}")
    return 0 if all(r.verdict in ("right", "skipped") for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
