"""topk_router: which experts a token goes to, as Mixtral, Qwen and DeepSeek choose them."""

from __future__ import annotations

from typing import Literal

import torch

from weft.kernels.engine.local_matmul import in_sum_dtype


def topk_router(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token with the highest scores, and their weights.

    A reference, in torch's ops and in fp32 at least; the layer takes those of any other router.

    Args:
        logits: (*, E), of each token for each expert.
        k: how many experts a token goes to.
        scoring: score = softmax(logits) over all experts (Mixtral, Qwen, DeepSeek-V2), or
            sigmoid(logits) (DeepSeek-V3).
        normalize: whether the k weights of a token add up to 1, or are the scores.
        scale: factor of the weights (DeepSeek's routed_scaling_factor).
        bias: (E,), added to scores to choose experts, but not to weights: raised for experts with
            few tokens, and lowered for others, it balances the load without a loss.
        groups, top_groups: experts are in `groups` of consecutive ones, and a token goes to those
            of its best `top_groups` only, by the sum of the two highest scores of a group. None:
            to all.

    Returns:
        ids (*, k) int64, the best expert first, and weights (*, k) in fp32 (fp64 for fp64),
        differentiable.

    Raises:
        ValueError: options or shapes that do not fit.

    Example:
        logits [0, log 3, log 1] and k = 2 give ids [1, 0] and weights [.75, .25].
    """
    E, chosen_groups = logits.shape[-1], groups if top_groups is None else top_groups
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f'scoring must be "softmax" or "sigmoid", got {scoring!r}')
    if groups < 1 or E % groups or not 1 <= chosen_groups <= groups:
        raise ValueError(
            f"groups must divide the {E} experts, and hold top_groups, got {groups=} and "
            f"{top_groups=}"
        )
    if bias is not None and bias.shape != (E,):
        raise ValueError(f"bias must be ({E},), one for each expert, got {tuple(bias.shape)}")
    if not 1 <= k <= E // groups * chosen_groups:
        raise ValueError(
            f"k must be 1 to {E // groups * chosen_groups}, the experts that a token may go to, "
            f"got {k}"
        )
    wide = in_sum_dtype(logits if logits.is_floating_point() else logits.float())
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias.detach()
    if chosen_groups < groups:
        by_group = ranked.unflatten(-1, (groups, E // groups))
        best = by_group.topk(min(2, E // groups), -1).values.sum(-1).topk(chosen_groups, -1).indices
        outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, False)
        ranked = by_group.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = ranked.topk(k, -1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights if scale == 1.0 else weights * scale
