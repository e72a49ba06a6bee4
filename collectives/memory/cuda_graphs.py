"""CUDA graphs of functions that make calls of weft: captured once, replayed with other values.

    graph = cuda_graph(step, *sample)     step runs, which compiles kernels and makes memory;
                                          then it is captured, on copies of the sample
    results = graph(*args)                values are copied there, and all launches are made again

`torch.cuda.graph` knows nothing of peers. Here a replay is a call as others are: on all memory that
the captured calls use, it comes after the calls before it, whatever their streams, is compared
across ranks, and raises what has failed before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from weft.collectives.memory.workspace import Workspace, workspaces
from weft.errors import WeftError


class CudaGraph:
    """A captured function. Made by `cuda_graph`.

    Attributes:
        inputs: the arguments that replays read. What is written there need not be passed: pass the
            input itself.
        results: what the function returned. Every replay overwrites its tensors.
    """

    def __init__(self, fn: Callable[..., Any], sample: Sequence[Any], warmup: int) -> None:
        tensors = [x for x in sample if isinstance(x, torch.Tensor)]
        devices = {x.device for x in tensors}
        if not sample:
            devices = {torch.device("cuda", torch.cuda.current_device())}
        self._name = f"the CUDA graph of {getattr(fn, '__qualname__', type(fn).__name__)}"
        if [device.type for device in devices] != ["cuda"]:
            raise ValueError(
                f"cuda_graph takes a sample with tensors on one GPU, got some on "
                f"{sorted(map(str, devices))}: on a CPU, call the function itself"
            )
        if warmup < 1:
            raise ValueError(
                f"warmup must be at least 1, as the memory and kernels of calls are not made in a "
                f"capture: got {warmup}"
            )
        (self._device,) = devices
        self.inputs = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in sample]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            main, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(warmup):
                    fn(*self.inputs)
            main.wait_stream(side)
            self.results, self._used = self._captured(fn)
        # Where all ranks are in step, these numbers are the same on all of them.
        self._told = [(("captured as call", ws.group.calls.position),) for ws in self._used]
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(self.results)):
            raise ValueError(
                f"{self._name} has results that require a gradient, and a replay records none: "
                f"capture it under torch.no_grad(), or a function that also runs the backward"
            )

    def _captured(self, fn: Callable[..., Any]) -> tuple[Any, list[Workspace]]:
        """What `fn` returns, and the memory of its calls."""
        before = {ws: ws.captured for ws in workspaces()}
        for ws in before:
            ws.captured = False
        try:
            # Threads of ours look after peers meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                results = fn(*self.inputs)
            return results, [ws for ws in workspaces() if ws.captured]
        except WeftError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._name} could not be captured: {error}. In a capture the host waits for no "
                f"result (.item(), .tolist(), .cpu()), and calls need the memory of the sample's "
                f"sizes"
            ) from error
        finally:
            for ws, captured in before.items():
                ws.captured |= captured

    def __call__(self, *args: Any) -> Any:
        """Replay with these arguments, in the current stream: `results`, overwritten.

        Raises:
            ValueError: the arguments are not like the sample.
            RuntimeError: `weft.close()` has freed the memory of the calls.
            PeerTimeout, MismatchError: as of any call; also if another rank replays another graph.
        """
        self._check(args)
        with ExitStack() as stack:
            for ws, told in zip(self._used, self._told, strict=True):
                stack.enter_context(ws.call(self._name, told))
            for x, into in zip(args, self.inputs, strict=True):
                if x is not into and isinstance(x, torch.Tensor):
                    into.copy_(x)
            self._graph.replay()
        return self.results

    def _check(self, args: Sequence[Any]) -> None:
        wanted, got = (tuple(map(_argument_text, some)) for some in (self.inputs, args))
        if got != wanted:
            raise ValueError(
                f"{self._name} takes arguments like those of its sample, ({', '.join(wanted)}), "
                f"got ({', '.join(got)}): pad them, or capture a graph for each size"
            )
        if not all(ws.is_open for ws in self._used):
            raise RuntimeError(
                f"{self._name} refers to memory that weft.close() has freed: capture it again"
            )


def _argument_text(x: Any) -> str:
    """All of an argument that a graph depends on; of what is no tensor, itself."""
    return f"{x.dtype} {[*x.shape]} on {x.device}" if isinstance(x, torch.Tensor) else repr(x)


def cuda_graph(fn: Callable[..., Any], *sample: Any, warmup: int = 2) -> CudaGraph:
    """Capture `fn(*sample)` in a CUDA graph, whose replays cost the host next to nothing.

    Collective: every rank captures the same calls, and replays graphs in the same order.

    Args:
        fn: makes calls of weft and of torch, and reads no result on the host. Where shards are
            gathered, it passes `sizes=`. What it holds itself (weights, caches) is used in place,
            by the runs before the capture too.
        sample: arguments, of which the tensors, on one GPU, are copied: replays take others of the
            same shape and dtype. What is no tensor stays as it is. Without any, it is captured on
            the current GPU, and reads what it holds.
        warmup: how many times `fn` runs before it is captured.

    Returns:
        `graph(*args)`: returns the same tensors each time, overwritten.

    Raises:
        ValueError: the tensors are not on one GPU, or results require a gradient.
        RuntimeError: `fn` does what cannot be captured.

    Example:
        graph = weft.cuda_graph(decode, tokens); logits = graph(other_tokens)
    """
    return CudaGraph(fn, sample, warmup)
