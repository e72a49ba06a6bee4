"""Settings: environment variables, the choice of engine, and the record of what was chosen.

Environment variables, read when they are used; an empty one counts as not set:

    WEFT_TIMEOUT_S   seconds that a rank waits for a peer before it raises `PeerTimeout` (600)
    WEFT_CHECK       1: compare every call across ranks first, and tell from which lines it came (0)
    WEFT_ENGINE      auto, triton, host or generic: the engine where no `weft.engine` is set (auto)
    WEFT_DIRECT      0: CPU ranks share memory even where they could read each other's own (1)
    WEFT_MULTIMEM    1: the NVLink switch may add up sums, fused ones too, in its own order (0)
    WEFT_SMS         SMs (CUs) of a GPU that kernels count on; the rest is left to others (all)
    WEFT_CACHE_DIR   the one folder of what is measured on this machine (~/.cache/weft)
    WEFT_TUNED       folder of the tables of tuned launches and of rates (weft/kernels/tuned)
    WEFT_FLIGHT_DIR  folder of every process's last calls, and of stacks on SIGUSR1 (in memory)
    WEFT_NVLINK      this GPU's NVLink domain, whose machines are one host; 0: none (the driver's)
    WEFT_LOG         compile: print or log (logger weft.compile) what the pass has fused ()
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args

Engine = Literal["auto", "triton", "host", "generic"]
_ENGINES: tuple[str, ...] = get_args(Engine)
_Value = TypeVar("_Value")


class _Scoped(Generic[_Value]):
    """A value that holds inside of a `with` block, for the thread that has entered it.

    torch's own threads, which run the backward of what is on a GPU, see the value of the block that
    was entered last: a thread of the user's waits in it for them.
    """

    def __init__(self, name: str, outside: _Value) -> None:
        self._here, self._outside = ContextVar(name, default=outside), outside
        self._entered: dict[object, _Value] = {}  # by block, in order

    def get(self) -> _Value:
        value = self._here.get()
        if value is self._outside and self._entered:
            thread = threading.current_thread()
            if isinstance(thread, threading._DummyThread):  # one that Python has not started
                return next(reversed(self._entered.values()))
        return value

    @contextmanager
    def block(self, value: _Value) -> Iterator[None]:
        token, key = self._here.set(value), object()
        self._entered[key] = value
        try:
            yield
        finally:
            del self._entered[key]
            self._here.reset(token)


_engine: _Scoped[Engine | None] = _Scoped("weft_engine", None)
_listeners: _Scoped[tuple[Callable[[Decision], object], ...]] = _Scoped("weft_listeners", ())


VARIABLES = (
    "WEFT_TIMEOUT_S",
    "WEFT_CHECK",
    "WEFT_ENGINE",
    "WEFT_DIRECT",
    "WEFT_MULTIMEM",
    "WEFT_SMS",
    "WEFT_CACHE_DIR",
    "WEFT_TUNED",
    "WEFT_FLIGHT_DIR",
    "WEFT_NVLINK",
    "WEFT_LOG",
)

# Those that decide how ranks meet: one that differs would have them wait for each other in vain.
SAME_ON_ALL_RANKS = ("WEFT_CHECK", "WEFT_ENGINE", "WEFT_MULTIMEM", "WEFT_SMS")

# What os.environ reads: looked up here without its encoding, which takes 1 us where nothing is set.
_variables: dict[bytes, bytes] = vars(os.environ)["_data"]


def _variable(name: str, default: str) -> str:
    value = _variables.get(name.encode())
    return os.fsdecode(value) if value else default


# Of those, what a call goes by each time it is made.
_OF_CALLS = (b"WEFT_ENGINE", b"WEFT_TIMEOUT_S", b"WEFT_SMS", b"WEFT_CHECK", b"WEFT_MULTIMEM")


def set_for_calls() -> tuple[Hashable, ...]:
    """All settings that a call may depend on, as they are set: to compare, and no more."""
    return _engine.get(), *map(_variables.get, _OF_CALLS)


def same_on_all_ranks() -> dict[str, str]:
    """The variables that must be the same on all ranks, as they are set; empty if not."""
    return {name: _variable(name, "") for name in SAME_ON_ALL_RANKS}


def _flag(name: str, default: str) -> bool:
    text = _variable(name, default)
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def timeout_s() -> float:
    """Seconds that a wait lasts at most.

    Raises:
        ValueError: WEFT_TIMEOUT_S is not a number above 0.
    """
    return _seconds(_variable("WEFT_TIMEOUT_S", "600"))


@lru_cache(maxsize=16)
def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"WEFT_TIMEOUT_S must be a number of seconds above 0, got {text!r}")
    return seconds


def check_calls() -> bool:
    """Whether each call is compared across ranks before it starts."""
    return _flag("WEFT_CHECK", "0")


def direct_reads() -> bool:
    """Whether CPU ranks read large tensors straight from each other's memory, where they may."""
    return _flag("WEFT_DIRECT", "1")


def given_nvlink_domain() -> str:
    """The name given to this rank's NVLink domain, or "0" for none; empty: ask the driver."""
    return _variable("WEFT_NVLINK", "")


def multimem() -> bool:
    """Whether the NVLink switch may add up sums, though not in rank order."""
    return _flag("WEFT_MULTIMEM", "0")


_LEAST_SMS = 8


def sms() -> int:
    """How many SMs of a GPU kernels count on; 0: all of them. The same on every rank.

    Raises:
        ValueError: WEFT_SMS is not a whole number of 8 or more.
    """
    text = _variable("WEFT_SMS", "")
    if not text:
        return 0
    if not text.isdecimal() or int(text) < _LEAST_SMS:
        raise ValueError(
            f"WEFT_SMS must be a whole number of SMs, {_LEAST_SMS} or more, got {text!r}"
        )
    return int(text)


def cache_dir() -> Path:
    """Where measurements of this machine are kept."""
    return Path(_variable("WEFT_CACHE_DIR", "~/.cache/weft")).expanduser()


def cache_dir_is_set() -> bool:
    """Whether WEFT_CACHE_DIR names that folder: then nothing is read or kept elsewhere."""
    return bool(_variable("WEFT_CACHE_DIR", ""))


def tuned() -> str:
    """The folder of tuned tables; empty for that of the kernels."""
    return _variable("WEFT_TUNED", "")


def flight_dir() -> Path | None:
    """Where a process keeps its last calls; None for memory alone."""
    text = _variable("WEFT_FLIGHT_DIR", "")
    return Path(text).expanduser() if text else None


_LOGS = ("compile",)


def logged() -> tuple[str, ...]:
    """What is to be logged that usually is not.

    Raises:
        ValueError: WEFT_LOG names something else.
    """
    names = tuple(name.strip() for name in _variable("WEFT_LOG", "").split(",") if name.strip())
    if unknown := [name for name in names if name not in _LOGS]:
        raise ValueError(f"WEFT_LOG must name some of {', '.join(_LOGS)}, got {unknown}")
    return names


def _engine_named(name: str, told_by: str = "engine") -> Engine:
    if name not in _ENGINES:
        raise ValueError(f"{told_by} must be one of {', '.join(_ENGINES)}, got {name!r}")
    return cast(Engine, name)


def current_engine() -> Engine:
    """The engine asked for: by `weft.engine`, else by WEFT_ENGINE, else "auto"."""
    return _engine.get() or _engine_named(_variable("WEFT_ENGINE", "auto"), "WEFT_ENGINE")


@contextmanager
def engine(name: Engine) -> Iterator[None]:
    """Force one engine for the fused ops called inside the block.

    Every rank must force the same one. An engine that cannot run a call raises
    `NotImplementedError` with the reason; only "auto" falls back. The gradient of a call runs on
    the engine of the call. What torch.utils.checkpoint recomputes runs on the engine that is set
    during the backward.

    Raises:
        ValueError: no engine has this name.

    Example:
        >>> with weft.engine("host"):
        ...     y = weft.all_gather_matmul(x, w)
    """
    with _engine.block(_engine_named(name)):
        yield


@dataclass(frozen=True)
class Decision:
    """One call of an op: which engine ran it, and why.

    `collective` is what a redistribution amounts to; empty for other ops. `ranks` is the size of
    the group; 0 where it is not told. `candidates` are the layouts and fused ops that a call of
    DTensors chose from, one a line, with their predicted times or why they are impossible.
    """

    op: str
    engine: str
    why: str
    shapes: str = ""
    collective: str = ""
    ranks: int = 0
    candidates: tuple[str, ...] = ()

    def __str__(self) -> str:
        shapes = f"({self.shapes})" if self.shapes else ""
        line = f"{self.op}{shapes}: {self.engine}, {self.why}"
        return "\n    ".join([line, *self.candidates])


class Explanation(tuple[Decision, ...]):
    """What `weft.explain` saw, in order. Prints as a line a call, candidates below it.

    Attributes:
        result: what the function returned.
        receipts: of a compiled function that was not run: what became of each of its collectives.
    """

    result: Any
    receipts: Any = None

    def __str__(self) -> str:
        if self.receipts is not None:
            return str(self.receipts)
        return "\n".join(map(str, self)) or "no op of weft ran"


def tracing() -> bool:
    """Whether `record` has a listener; otherwise callers skip the formatting."""
    return bool(_listeners.get())


def record(
    op: str,
    engine: str,
    why: str,
    shapes: str = "",
    collective: str = "",
    ranks: int = 0,
    candidates: tuple[str, ...] = (),
) -> None:
    """Tell listeners (`weft.explain`) that `engine` runs `op`."""
    for listener in _listeners.get():
        listener(Decision(op, engine, why, shapes, collective, ranks, candidates))


@contextmanager
def listening(listener: Callable[[Decision], object]) -> Iterator[None]:
    """Call `listener` with the decision of every call inside the block."""
    with _listeners.block((*_listeners.get(), listener)):
        yield


@contextmanager
def explaining() -> Iterator[list[Decision]]:
    """Collect the decisions of the calls inside the block."""
    decisions: list[Decision] = []
    with listening(decisions.append):
        yield decisions


# What torch.compile has returned, and modules whose regions have been compiled in place.
_COMPILED = "_torchdynamo_orig_callable", "_compiled_call_impl"
NOTHING_COMPILED = (
    "no graph of it has gone through weft's pass: compile it with backend='weft', and call it first"
)

# What became of the collectives of a compiled function; set by `weft.kernels.graphs`.
receipts_of: Callable[[Any], Any] | None = None


def compiled_parts(fn: Any) -> list[Any]:
    """What torch compiles of a function or module: itself, or modules inside."""
    modules = fn.modules() if hasattr(fn, "named_parameters") else ()
    parts = {id(part): part for part in (fn, *modules)}.values()
    return [p for p in parts if any(getattr(p, name, None) is not None for name in _COMPILED)]


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` and report which engine ran each op of weft in it, and why.

    It really runs, on every rank of the group. The value of `fn` is in `.result`. What torch has
    compiled, or a module some of whose parts it has, is not run if it is given no arguments: the
    report is then of each collective that has gone through weft's pass in it so far, fused or not,
    and why.

    Example:
        >>> print(weft.explain(lambda: weft.all_gather_matmul(x, w)))
        all_gather_matmul(8x8 @ 8x8, 2 ranks): host, predicted 71 us against 355 us for generic

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(
            f"explain calls what it explains: weft.explain(layer, x), or weft.explain(lambda: "
            f"layer(x)), got a {type(fn).__name__}"
        )
    if not args and not kwargs and compiled_parts(fn):
        explanation = Explanation()
        explanation.result = None
        explanation.receipts = receipts_of(fn) if receipts_of else NOTHING_COMPILED
        return explanation
    with explaining() as decisions:
        result = fn(*args, **kwargs)
    explanation = Explanation(decisions)
    explanation.result = result
    return explanation
