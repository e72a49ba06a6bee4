"""The process group of virtual ranks: what torch.distributed calls, on meetings of `Members`.

    rank 0: all_reduce(x)  --- copy of x --->  meeting  --- all copies --->  x.copy_(their sum)
    rank 1: all_reduce(x)  ----------------->           ------------------>  x.copy_(their sum)

Every call contributes copies and returns a `Work`, whose `wait` waits until all members have come
and then fills the outputs. Calls order the ranks as a barrier does. Reductions add in rank order,
in the tensors' own type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.collectives.ranks.group import Group, alone
from weft.sim.run.team import Meeting
from weft.sim.schedule.untimed import untimed

if TYPE_CHECKING:
    from weft.sim.run.gpu import ThreadTeam
    from weft.sim.run.team import Team

Tensors = Sequence[torch.Tensor]


class VirtualWork(dist.Work):
    """What a call gives: `wait` ends it.

    Args:
        ready: whether `finish` would not wait; if not, others go on.
    """

    outputs: Sequence[Any] = ()

    def __init__(self, finish: Callable[[], None], ready: Callable[[], bool]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._ready = ready

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the other members, and fill the outputs."""
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        """Whether all members have come; the outputs are then filled."""
        return self._finish is None or (self._ready() and self.wait())

    def is_success(self) -> bool:
        """A call that fails raises in `wait`."""
        return self.is_completed()

    def synchronize(self) -> None:
        """`wait`."""
        self.wait()

    def get_future(self) -> Any:
        """Of the outputs of an all-reduce, for DistributedDataParallel; waits for them."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.outputs)
        return future


# Its methods are those that torch calls, which are not those that its stubs describe.
_Base: Any = dist.ProcessGroup


class VirtualProcessGroup(_Base):  # type: ignore[misc]
    """A virtual rank's handle on its group. Methods are torch's (`torch.distributed.ProcessGroup`).

    Attributes:
        weft_group: the same as weft's own calls take it.
    """

    def __init__(self, team: Team | ThreadTeam, rank: int) -> None:
        self._me, self._team = team.ranks.index(rank), team
        size = len(team.ranks)
        super().__init__(self._me, size)
        hosts, here = team.hosts, alone().processes * size
        why = "its ranks are on several hosts" if hosts else ""
        self.weft_group = Group(
            self,
            self._me,
            size,
            team.ranks,
            () if why else here,
            why,
            virtual=team,
            calls=team.noting(),
            hosts=hosts,
        )

    @property
    def group_name(self) -> Any:
        """As torch.distributed has registered it."""
        if self not in distributed_c10d._world.pg_names:
            raise NotImplementedError(
                "virtual ranks have no process group before torch.distributed.init_process_group: "
                "call it first, or weft untraced"
            )
        return distributed_c10d._world.pg_names[self]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> VirtualProcessGroup:
        return self  # torch 2.15 asks it whether it joins messages: without a word it does not

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "virtual"

    def size(self) -> int:
        return len(self._team.ranks)

    def rank(self) -> int:
        return self._me

    def _call(
        self, call: str, value: Any, finish: Callable[[list[Any]], None] = lambda values: None
    ) -> VirtualWork:
        meeting: Meeting = self._team.arrive(self._me, value, call)

        def end() -> None:
            values = self._team.attend(meeting, call)
            with self._team.timed_as_one(call.split()[0].partition("(")[0]):
                finish(values)

        return VirtualWork(end, lambda: self._team.complete(meeting))

    def allreduce(self, tensors: Tensors, opts: Any = None) -> VirtualWork:
        op = _reduce_op(opts)

        def finish(values: list[list[torch.Tensor]]) -> None:
            for index, tensor in enumerate(tensors):
                tensor.copy_(_reduce_all([value[index] for value in values], op))

        work = self._call(
            f"all_reduce({op}) {_shapes_and_dtypes(tensors)}", _cloned(tensors), finish
        )
        work.outputs = tensors
        return work

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> VirtualWork:
        op, root = _reduce_op(opts), opts.rootRank

        def finish(values: list[list[torch.Tensor]]) -> None:
            if self._me == root:
                tensors[0].copy_(_reduce_all([value[0] for value in values], op))

        call = f"reduce({op}) {_shapes_and_dtypes(tensors)} to rank {self._team.ranks[root]}"
        return self._call(call, _cloned(tensors), finish)

    def broadcast(self, tensors: Tensors, opts: Any) -> VirtualWork:
        root = opts.rootRank

        def finish(values: list[Any]) -> None:
            for tensor, value in zip(tensors, values[root], strict=True):
                tensor.copy_(value)

        call = f"broadcast {_shapes_and_dtypes(tensors)} from rank {self._team.ranks[root]}"
        return self._call(call, _cloned(tensors) if self._me == root else None, finish)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        def finish(values: list[list[torch.Tensor]]) -> None:
            for index, parts in enumerate(outputs):
                for part, value in zip(parts, values, strict=True):
                    part.copy_(value[index].view_as(part))

        return self._call(f"all_gather {_shapes_and_dtypes(inputs)}", _cloned(inputs), finish)

    def all_gather_single(
        self, output: torch.Tensor, value: torch.Tensor, opts: Any = None
    ) -> VirtualWork:
        return self.all_gather_single_coalesced([output], [value], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        return self.allgather(
            [_equal_parts(output, self.size()) for output in outputs], inputs, opts
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> VirtualWork:
        root = opts.rootRank

        def finish(values: list[torch.Tensor]) -> None:
            if self._me == root:
                for part, value in zip(outputs[0], values, strict=True):
                    part.copy_(value)

        call = f"gather {_shapes_and_dtypes(inputs)} to rank {self._team.ranks[root]}"
        return self._call(call, _cloned(inputs[:1])[0], finish)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> VirtualWork:
        root = opts.rootRank
        brought = _cloned(inputs[0]) if self._me == root else None
        call = f"scatter {_shapes_and_dtypes(outputs)} from rank {self._team.ranks[root]}"
        return self._call(
            call, brought, lambda values: _copy_into(outputs[0], values[root][self._me])
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> VirtualWork:
        op = _reduce_op(opts)

        def finish(values: list[list[list[torch.Tensor]]]) -> None:
            for index, output in enumerate(outputs):
                terms = [value[index][self._me] for value in values]
                output.copy_(_reduce_all(terms, op).view_as(output))

        brought = [_cloned(parts) for parts in inputs]
        return self._call(f"reduce_scatter({op}) {_shapes_and_dtypes(inputs[0])}", brought, finish)

    def reduce_scatter_single(
        self, output: torch.Tensor, value: torch.Tensor, opts: Any = None
    ) -> VirtualWork:
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        parts = [_equal_parts(value, self.size()) for value in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> VirtualWork:
        def finish(values: list[list[torch.Tensor]]) -> None:
            for output, value in zip(outputs, values, strict=True):
                _copy_into(output, value[self._me])

        return self._call("all_to_all", _cloned(inputs), finish)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> VirtualWork:
        outputs, inputs = (
            list(tensor.split(list(sizes))) if sizes else _equal_parts(tensor, self.size())
            for tensor, sizes in ((output, output_sizes), (value, input_sizes))
        )
        return self.alltoall(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> VirtualWork:
        return self._call("barrier", None)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> VirtualWork:
        self._team.send(self._me, target, tag, _cloned(tensors)[0])
        return VirtualWork(lambda: None, lambda: True)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> VirtualWork:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> VirtualWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> VirtualWork:
        def finish() -> None:
            work.source, value = self._team.receive(source, self._me, tag)
            _copy_into(tensors[0], value)

        work = _Receive(finish, lambda: self._team.has_mail(source, self._me, tag))
        return work

    # What they are called before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Receive(VirtualWork):
    source = -1

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


_REDUCE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _reduce_op(opts: Any) -> str:
    if opts is None:
        return "SUM"
    for name in _REDUCE:
        if opts.reduceOp == getattr(dist.ReduceOp, name):
            return str(name)
    raise NotImplementedError(f"virtual ranks reduce by {', '.join(_REDUCE)}, not {opts.reduceOp}")


def _reduce_all(terms: list[torch.Tensor], op: str) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = _REDUCE[op](total, term)
    return total / len(terms) if op == "AVG" else total


def _cloned(tensors: Tensors) -> list[torch.Tensor]:
    # What is sent is sent from where it is: that it is copied here takes no virtual time.
    with untimed():
        return [tensor.detach().clone() for tensor in tensors]


def _equal_parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    if tensor.shape[0] % count:
        raise ValueError(f"{tuple(tensor.shape)} does not divide into {count} equal parts")
    return list(tensor.split(tensor.shape[0] // count)) if tensor.numel() else [tensor] * count


def _copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    if target.numel() != value.numel() or target.dtype != value.dtype:
        raise ValueError(
            f"received {tuple(value.shape)} {value.dtype} for a tensor of "
            f"{tuple(target.shape)} {target.dtype}"
        )
    target.copy_(value.view_as(target))


def _shapes_and_dtypes(tensors: Tensors) -> str:
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
