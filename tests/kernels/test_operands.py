"""Which operands kernels read by tensor descriptor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.kernels.device import operands
from weft.kernels.engine.chips import Tiling


def test_what_goes_by_descriptor() -> None:
    """Blocks of rows or columns that lie together, whole multiples of 16 bytes apart."""
    x, w = torch.ones(40, 48, dtype=torch.bfloat16), torch.ones(48, 64, dtype=torch.bfloat16)
    x_columns, w_columns = (each.T.contiguous().T for each in (x, w))

    def goes(
        xs: list[torch.Tensor], weights: list[torch.Tensor], starts: Sequence[int] = ()
    ) -> bool:
        made = operands.described(xs, weights, Tiling(32, 32, 16), True, starts)
        return made.arguments[0] is not None

    assert goes([x], [w]) and goes([x_columns, x_columns], [w, w]) and goes([x], [w_columns])
    assert goes([x], [w], (0, 5)) and goes([x_columns], [w], (0, 8))
    assert not goes([x_columns], [w], (0, 5))  # 10 bytes into a column
    assert not goes([x[:, 1:]], [w[1:]]) and not goes([x[:, ::2]], [w[::2]])
    assert not goes([x[:, :45].contiguous()], [w[:45]])
    assert not goes([torch._neg_view(x)], [w]) and not goes([x[:0]], [w])
    assert not goes([x, x_columns], [w, w]) and not goes([x, x], [w, w_columns])
    assert not goes([x] * 4, [w] * 4)
    for weights, described in (([w, w], 2), ([w_columns], 1), ([w, w_columns], 0), ([w] * 3, 0)):
        made, transposed = operands.described_weights(weights, Tiling(32, 32, 16), True)
        assert len(made) == 2 and sum(each is not None for each in made) == described
        assert transposed == (described == 1)
