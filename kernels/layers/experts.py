"""ExpertParallelMLP: the experts of a mixture, each on one rank, or cut over a few.

    x (T, H) of each rank, ids (T, k), weights (T, k)
    --dispatch--> rows of own experts --gate, up--> silu(gate) * up --down--> --combine--> y (T, H)

Two fused ops, forward and backward: `dispatch_grouped_matmul` and `grouped_matmul_combine`. With
experts e, e + 1, .. and features f, f + 1, .. a rank keeps

    gate_proj, up_proj (E_r, F_r, H)      down_proj (E_r, H, F_r)

whatever the names and shapes that they were made from: see `expert_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from weft.collectives import all_gather, chunk_sizes, resolve
from weft.collectives.memory.checks import check_shards
from weft.collectives.ranks.group import GroupLike
from weft.collectives.ranks.traced import is_traced
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import Quantize, check_quantize
from weft.kernels.experts.combine import grouped_matmul_combine
from weft.kernels.experts.dispatch import dispatch_grouped_matmul
from weft.kernels.experts.routing import check_sets, check_weights, share
from weft.kernels.layers.expert_weights import ROLES, ExpertLayout, Experts, found, weights_layout
from weft.kernels.layers.module import ParallelModule, cut_like, whole_again
from weft.kernels.layers.split import Split

if TYPE_CHECKING:
    from typing_extensions import Self


class ExpertParallelMLP(ParallelModule):
    """The experts of a mixture, spread over the ranks (by torch.chunk): a weighted sum of MLPs.

    Input: this rank's tokens x (*, H), the experts of each, and their weights, as a router gives
    them: `topk_router`, or any other. Output: (*, H) for the same tokens. Ranks may have different
    numbers of tokens, or none; no token is dropped. The router is left to the caller, and so are
    experts that every token goes to (`shared_experts` of `forward`).

    Gradients of experts are sums over the tokens of all ranks. Those of what every rank has, as the
    router, are of its own tokens: add them up over the ranks, as in data parallelism.

    `state_dict()`, which every rank must call, returns the weights of all experts under the names
    of what the layer was made from. `load_state_dict` takes all of them, or this rank's part.

    Attributes:
        last_load: (E,) int64: how many of all ranks' assignments each expert got in the last
            forward, the same on every rank; None before. For balance losses, and for the bias of
            `topk_router`.

    Example:
        >>> experts = weft.ExpertParallelMLP.from_experts(block.experts)
        >>> ids, weights = weft.topk_router(block.gate(x), k=2)
        >>> y = experts(x, ids, weights)
    """

    cut: ClassVar[dict[str, int]] = dict.fromkeys(ROLES, 0)
    gate_proj: nn.Parameter | None
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    last_load: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike = None,
        tensor_parallel_size: int = 1,
        activation: Activation = "swiglu",
        keep_gathered: bool = False,
        quantize: Quantize | None = None,
        wire_dtype: torch.dtype | None = None,
        capacity: int | None = None,
    ) -> None:
        """Draw the weights of experts made of nn.Linear, without biases, and keep this rank's part.

        Args:
            num_experts: E, of all ranks.
            hidden_size, intermediate_size: H and F. With the same seed on every rank, the weights
                are those of E modules, made one after the other, of gate, up and down.
            device, dtype: of the weights.
            group: ProcessGroup, 1-D DeviceMesh, or None for the world.
            tensor_parallel_size: on how many consecutive ranks each expert is, a part of F on each.
            activation: "swiglu": down(silu(gate(x)) * up(x)). Otherwise one of those of
                `all_gather_matmul`, and there is no gate: down(activation(up(x))).
            keep_gathered: keep the rows of own experts, k times the tokens, for the gradients of
                weights. False: they are sent again in backward.
            quantize: "fp8": tokens travel to their experts in fp8, as of `dispatch_grouped_matmul`.
            wire_dtype: in which results travel to their tokens, as of `grouped_matmul_combine`.
            capacity: how many rows a rank may receive at most, as of `weft.kernels.route`.

        Raises:
            ValueError: sizes below 1, a tensor_parallel_size that does not divide the ranks, an
                unknown activation.
        """
        super().__init__()
        layout, sizes = weights_layout(activation), (num_experts, intermediate_size, hidden_size)
        self._plan(layout, sizes, group, tensor_parallel_size, activation)
        self._travel(keep_gathered, quantize, wire_dtype, capacity)
        rank = self.group.rank
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self._keep({role: torch.empty(self._shape(role, rank), **like) for role in layout.roles})
        self.reset_parameters()

    @classmethod
    def from_experts(
        cls,
        experts: Experts,
        group: GroupLike = None,
        *,
        tensor_parallel_size: int = 1,
        activation: Activation = "swiglu",
        keep_gathered: bool = False,
        quantize: Quantize | None = None,
        wire_dtype: torch.dtype | None = None,
        capacity: int | None = None,
    ) -> Self:
        """This rank's part of `experts`, which must hold the same values on every rank.

        Args:
            experts: a list of modules with linear layers `gate_proj`, `up_proj` and `down_proj`, or
                `w1`, `w3` and `w2`; or a module, or dict of tensors, that has these stacked:
                (E, F, H), and (E, H, F) for down; or `gate_up_proj` (E, 2 F, H), the gate in front,
                and `down_proj`, as transformers 5 has. Without gates if `activation` is not
                "swiglu".
            group, tensor_parallel_size, activation, keep_gathered, quantize, wire_dtype, capacity:
                as of the constructor.

        Raises:
            ValueError: other names or parameters (biases), shapes that do not fit, transposed or
                quantized weights, DTensors, modules that tell of another activation.
        """
        layout, weights, sizes = found(experts, activation)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._plan(layout, sizes, group, tensor_parallel_size, activation)
        module._travel(keep_gathered, quantize, wire_dtype, capacity)
        with torch.no_grad():
            parts = {role: module._own(role, weights) for role in layout.roles}
        module._keep(parts, all(weight.requires_grad for weight in weights.values()))
        return module

    def _plan(
        self,
        layout: ExpertLayout,
        sizes: tuple[int, int, int],
        group: GroupLike,
        tensor_parallel_size: int,
        activation: Activation,
    ) -> None:
        """What is where."""
        self.num_experts, self.intermediate_size, self.hidden_size = sizes
        if min(sizes) < 1:
            raise ValueError(
                f"num_experts, intermediate_size and hidden_size must be at least 1, got {sizes}"
            )
        self.group, tp = resolve(group), tensor_parallel_size
        check_sets(self.group, tp)
        self.tensor_parallel_size, self.activation = tp, activation
        self.layout, self.last_load = layout, None
        self.split = Split((self.intermediate_size,), (1,), tp)
        counts = chunk_sizes(self.num_experts, self.group.world_size // tp)
        first = sum(counts[: self.group.rank // tp])
        self.own_experts = range(first, first + counts[self.group.rank // tp])

    def _travel(
        self,
        keep_gathered: bool,
        quantize: Quantize | None,
        wire_dtype: torch.dtype | None,
        capacity: int | None,
    ) -> None:
        """How tokens and results do."""
        check_quantize(quantize)
        self.keep_gathered, self.quantize = keep_gathered, quantize
        self.wire_dtype, self.capacity = wire_dtype, capacity

    def _keep(self, parts: Mapping[str, torch.Tensor], trained: bool = True) -> None:
        for role in ROLES:
            part = parts.get(role)
            self.register_parameter(role, None if part is None else nn.Parameter(part, trained))

    def _shape(self, role: str, rank: int) -> tuple[int, int, int]:
        """Of a rank's part."""
        tp = self.tensor_parallel_size
        E = share(self.num_experts, rank, self.group.world_size, tp)
        F, H = self.split.parts[0][rank % tp], self.hidden_size
        return (E, H, F) if role == "down_proj" else (E, F, H)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        shared_experts: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """y[t] = sum over j of topk_weights[t, j] * expert topk_ids[t, j] of x[t]. Collective.

        Args:
            x: (*, H): this rank's tokens, T in all.
            topk_ids: (*, k) or (T, k) integers: the experts of each token; -1 for padding.
            topk_weights: floats of any dtype, for each of topk_ids. Results are multiplied by them,
                and added up, in fp32.
            shared_experts: what every token goes to on its own rank: called with x when its rows
                are multiplied, while other ranks still work on theirs, and added to y.

        Returns:
            (*, H), of x's dtype.

        Raises:
            ValueError: shapes or dtypes that do not fit; on every rank, if an id of any is out of
                range, or a rank receives more rows than `capacity`.
            MismatchError: on every rank, if ranks differ in k, dtype or the number of experts; with
                WEFT_CHECK=1 also if ranks pass the same tokens.
            PeerTimeout: a rank did not come.
        """
        k = self._check(x, topk_ids, topk_weights)
        tokens = x.reshape(-1, x.shape[-1])
        if not is_traced(x):
            way_out = "Pass each rank its own part of the tokens, x.chunk(world_size)[rank]"
            check_shards(self.group, "ExpertParallelMLP", tokens, way_out)
        ups = [w.transpose(1, 2) for w in (self.gate_proj, self.up_proj) if w is not None]
        h, routing = dispatch_grouped_matmul(
            tokens,
            topk_ids.reshape(-1, k),
            ups if len(ups) > 1 else ups[0],
            self.group,
            activation=self.activation,
            tensor_parallel_size=self.tensor_parallel_size,
            keep_gathered=self.keep_gathered,
            quantize=self.quantize,
            capacity=self.capacity,
        )
        assert isinstance(h, torch.Tensor)  # of one weight, or of a pair that makes one
        self.last_load = routing.load
        shared = None if shared_experts is None else shared_experts(x)
        down, weights = self.down_proj.transpose(1, 2), topk_weights.reshape(-1, k)
        y = grouped_matmul_combine(h, down, weights, routing, wire_dtype=self.wire_dtype)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if shared is None else y + shared

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> int:
        """k; raises ValueError for what does not fit, before anything is sent."""
        H = self.hidden_size
        if x.ndim < 2 or x.shape[-1] != H:
            raise ValueError(f"x must be tokens (*, {H}), as hidden_size={H}, got {tuple(x.shape)}")
        check_weights(weights, ids)
        k = ids.shape[-1] if ids.ndim else 0
        if k < 1 or ids.shape[:-1] not in (x.shape[:-1], (x.shape[:-1].numel(),)):
            raise ValueError(
                f"topk_ids must be (*, k), k >= 1, for the tokens of x {tuple(x.shape)}, in rows "
                f"like x or one after the other, got {tuple(ids.shape)}"
            )
        return k

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as the constructor does, with the same seed on every rank."""
        sizes, like = (self.hidden_size, self.intermediate_size), self.up_proj
        with torch.no_grad():
            # Of what FSDP2 has cut once more, experts cannot be written to one by one.
            parts = {role: whole_again(getattr(self, role)) for role in self.layout.roles}
            for expert in range(self.num_experts):
                for role in self.layout.roles:
                    of_role = sizes[::-1] if role == "down_proj" else sizes
                    # One at a time: those of all experts need not fit into memory.
                    drawn = nn.Linear(*of_role, False, like.device, like.dtype).weight
                    if expert in self.own_experts:
                        mine = parts[role][expert - self.own_experts.start]
                        mine.copy_(self._features(role, drawn))
            for role, part in parts.items():
                if (held := getattr(self, role)) is not part:
                    held.copy_(cut_like(held, part))

    def _features(self, role: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the features of one expert, or of several."""
        dim = -1 if role == "down_proj" else -2
        return self.split.own(whole, dim, self.group.rank % self.tensor_parallel_size)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of what all experts have in one role, (E, F, H) or (E, H, F)."""
        own = self.own_experts
        return self._features(name, whole[own.start : own.stop])

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """What all experts have in one role. Collective."""
        W, tp = self.group.world_size, self.tensor_parallel_size
        shapes = [torch.Size(self._shape(name, rank)) for rank in range(W)]
        counts = [shape.numel() for shape in shapes]
        every = all_gather(part.reshape(-1), self.group, sizes=counts).split(counts)
        parts = [each.view(shape) for each, shape in zip(every, shapes, strict=True)]
        dim = 2 if name == "down_proj" else 1
        return torch.cat([torch.cat(parts[i : i + tp], dim) for i in range(0, W, tp)])

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what all experts have in each role."""
        E, F, H = self.num_experts, self.intermediate_size, self.hidden_size
        return {r: (E, H, F) if r == "down_proj" else (E, F, H) for r in self.layout.roles}

    def _own(self, role: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's part of a role, a new tensor, from what is stored: all, or that part."""
        layout, rank = self.layout, self.group.rank
        E, *whole = self.whole_shapes()[role]
        count, *part = self._shape(role, rank)
        shapes = layout.shape(role, (E, *whole)), layout.shape(role, (count, *part))
        values = []
        for key in layout.keys(self.own_experts, role):
            value = whole_again(stored[key])
            if tuple(value.shape) not in shapes:
                raise ValueError(
                    f"{key} must be whole, {shapes[0]}, or the part of rank {rank}, {shapes[1]}, "
                    f"got {tuple(value.shape)}"
                )
            is_whole, value = tuple(value.shape) == shapes[0], layout.value(role, value)
            if is_whole:
                value = self._features(role, value) if layout.listed else self.part(role, value)
            values.append(value)
        if not layout.listed:
            return values[0].detach().clone(memory_format=torch.contiguous_format)
        if not values:  # any is of the dtype and device
            return next(iter(stored.values())).detach().new_empty(count, *part)
        return torch.stack(values).detach()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        whole = {role: destination.pop(prefix + role) for role in self.layout.roles}
        destination.update((prefix + key, value) for key, value in self.layout.state(whole))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        layout, rest = self.layout, dict(state_dict)
        keys = layout.keys(range(self.num_experts))
        stored = {key: rest.pop(prefix + key) for key in keys if prefix + key in rest}
        own = layout.keys(self.own_experts)
        if strict:  # those of experts elsewhere need not be there
            missing_keys += [prefix + key for key in own if key not in stored]
        for role in layout.roles:
            rest[prefix + role] = getattr(self, role)  # unless there is another
            if stored and all(key in stored for key in layout.keys(self.own_experts, role)):
                try:
                    rest[prefix + role] = self._own(role, stored)
                except ValueError as error:
                    error_msgs.append(f"{prefix}{error}")
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """Sizes, and which experts are here."""
        E, F, H = self.num_experts, self.intermediate_size, self.hidden_size
        own, tp, group = self.own_experts, self.tensor_parallel_size, self.group
        features = f", {self.up_proj.shape[1]} of {F} features" if tp > 1 else ""
        return (
            f"num_experts={E}, hidden_size={H}, intermediate_size={F}, "
            f"activation={self.activation!r}, experts {own.start}:{own.stop}{features}, "
            f"rank {group.rank} of {group.world_size}"
        )
