"""`weft.cuda_graph`, with torch.cuda played by an object and a GPU's tensors by those of the CPU.

A capture notes the ops that run, and a replay runs them again, into the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_workspace import GPU, Gpu, Stream, gpu, on_gpu
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.collectives.memory.waiter import told_by
from weft.collectives.memory.workspace import Workspace
from weft.collectives.ranks import pad
from weft.errors import PeerTimeout, WeftError

_ = gpu  # a fixture
_CUDA = torch.cuda


class Tensor(torch.Tensor):
    device = GPU


class Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self.ops:
            made.copy_(func(*args, **kwargs))


class GraphGpu(Gpu):
    """Also graphs."""

    CUDAGraph = Graph

    def Stream(self) -> Stream:  # noqa: N802 - as torch names it
        return Stream("side", self.log)

    def __init__(self) -> None:
        super().__init__()
        self.device: Any = nullcontext

    def current_device(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return getattr(_CUDA, name)

    def current_stream(self, device: torch.device | None = None) -> Any:
        return self.current

    @contextmanager
    def graph(self, graph: Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        with self.stream(Stream("captured", self.log)), graph:
            self.captured.add("captured")
            try:
                yield
            finally:
                self.captured.clear()


@pytest.fixture
def graphs(gpu: Gpu) -> Iterator[GraphGpu]:
    fake = GraphGpu()
    with patch.object(torch, "cuda", fake):
        yield fake


def on_it(*values: float) -> torch.Tensor:
    return torch.tensor([*map(float, values)]).as_subclass(Tensor)


def step(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    with on_gpu(1).call("step"):
        return x * factor + 1


def test_replays_are_calls_with_other_values(graphs: GraphGpu) -> None:
    graph = weft.cuda_graph(step, on_it(1, 2), 3.0)
    with patch.object(Workspace, "check", autospec=True, side_effect=Workspace.check) as checked:
        first = graph(on_it(2, 5), 3.0)
        assert first.tolist() == [7, 16]
        graph.inputs[0].fill_(1)
        assert graph(graph.inputs[0], 3.0).tolist() == [4, 4]
    assert first.tolist() == [4, 4]  # the same tensor
    assert [str(call.args[1]) for call in checked.call_args_list] == ["the CUDA graph of step"] * 2


def test_a_function_runs_before_its_capture_and_in_no_replay(graphs: GraphGpu) -> None:
    ran = list[bool]()

    def counted(x: torch.Tensor) -> torch.Tensor:
        ran.append(graphs.is_current_stream_capturing())
        return step(x)

    sample = on_it(1)
    graph = weft.cuda_graph(counted, sample)
    assert graph.inputs[0] is not sample
    assert [graph(on_it(value)).item() for value in (2, 3)] == [5, 7]
    assert ran == [False, False, True] and sample.item() == 1


def test_ranks_are_told_which_graph_is_replayed(graphs: GraphGpu) -> None:
    """Calls of ranks are compared by these words: see `test_flight`."""
    calls, noted = on_gpu(1).group.calls, list[str]()
    one = weft.cuda_graph(step, on_it(1))
    with patch.object(calls, "position", 7):  # a rank by itself notes none
        other = weft.cuda_graph(step, on_it(1))

    def begin(call: Any) -> int:
        noted.append(call.text.decode())
        return -1

    with patch.object(calls, "begin", begin):
        for graph in (one, other, one):
            graph(on_it(2))
    assert noted[0] == noted[2] != noted[1]
    assert all(text.startswith("the CUDA graph of step, captured as call ") for text in noted)


def test_a_replay_raises_what_has_failed_before(graphs: GraphGpu) -> None:
    graph = weft.cuda_graph(step, on_it(1))
    results, inputs = graph(on_it(2)).tolist(), graph.inputs[0].tolist()
    failed = PeerTimeout(0, 1, "step", 3, 1.0)
    with patch.object(Workspace, "check", side_effect=failed), pytest.raises(PeerTimeout):
        graph(on_it(5))
    assert (graph.results.tolist(), graph.inputs[0].tolist()) == (results, inputs)
    assert graph(on_it(5)).tolist() == [11]


def test_a_replay_beside_another_call_is_told_of() -> None:
    """By the word that kernels leave: see `test_signals`."""
    error = told_by(pad.status_word(pad.OVERLAPPED, 2, 2, 7), 2, "all_reduce")
    assert type(error) is WeftError
    assert "CUDA graph that is replayed in one stream" in str(error) and "call 7" in str(error)


def test_what_a_function_holds_is_read_again(graphs: GraphGpu) -> None:
    held = on_it(1)
    graph = weft.cuda_graph(lambda: step(held))
    held.fill_(4)
    assert graph().tolist() == [9]


def test_replays_come_after_calls_in_other_streams(graphs: GraphGpu) -> None:
    graph = weft.cuda_graph(step, on_it(1))
    assert graphs.log[0] == "side waits for first" and graphs.log[-1] == "first waits for side"
    step(on_it(1))
    before = len(graphs.log)
    graphs.switch("second")
    graph(on_it(3))
    graphs.switch("third")
    step(on_it(1))
    assert len(graphs.log) == before + 2
    assert graphs.log[-2].startswith("second waits") and graphs.log[-1].startswith("third waits")


def test_what_does_not_fit_is_told(graphs: GraphGpu) -> None:
    for sample in ((torch.ones(2),), (3.0,), (on_it(1), torch.ones(2))):
        with pytest.raises(ValueError, match="on a CPU, call the function itself"):
            weft.cuda_graph(step, *sample)
    with pytest.raises(ValueError, match="warmup must be at least 1"):
        weft.cuda_graph(step, on_it(1), warmup=0)
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        weft.cuda_graph(lambda x: step(x * torch.ones(1, requires_grad=True)), on_it(1))
    graph = weft.cuda_graph(step, on_it(1, 2), 3.0)
    held = graph.inputs[0].clone()
    for args in ((on_it(1), 3.0), (on_it(1, 2).double(), 3.0), (on_it(1, 2), 2.0), (on_it(1, 2),)):
        with pytest.raises(ValueError, match="pad them, or capture a graph for each size"):
            graph(*args)
    assert torch.equal(graph.inputs[0], held)
    weft.close()
    with pytest.raises(RuntimeError, match="capture it again"):
        graph(on_it(1, 2), 3.0)


def test_what_cannot_be_captured_is_told(graphs: GraphGpu) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        if graphs.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return x

    with pytest.raises(RuntimeError, match=r"(?s)not permitted.*the host waits for no result"):
        weft.cuda_graph(reads, on_it(1))

    def grows(x: torch.Tensor) -> torch.Tensor:
        on_gpu(1 << 20 if graphs.is_current_stream_capturing() else 1)
        return x

    with pytest.raises(RuntimeError, match="cannot grow to 1048576 during CUDA-graph capture"):
        weft.cuda_graph(grows, on_it(1))


def test_only_memory_that_was_captured_lives_on(graphs: GraphGpu) -> None:
    step(on_it(1))
    ws = on_gpu(1)
    weft.cuda_graph(lambda x: x + 1, on_it(1))
    assert not ws.captured
    weft.cuda_graph(step, on_it(1))
    assert ws.captured
    weft.cuda_graph(lambda x: x + 1, on_it(1))
    assert ws.captured
