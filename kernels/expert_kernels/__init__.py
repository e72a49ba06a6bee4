"""The kernels of mixtures of experts: dispatch, combine, and the gradient of experts' weights.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `expert_tiles` (whose
tiles all of them work on), `dispatch_kernel`, with how rows come to it in `pulled_rows`, then
`combine_kernel` and `weigh_kernel`; `dispatch_launch` and `combine_launch` launch these. Of few
tokens each way is one launch: `few_tokens`, launched by `few_tokens_launch`, and back
`push_and_weigh_kernel`, by `combine_launch`; `hand_over` is between their programs.
`contract_grouped_kernel` makes weights' gradients, on one rank.
"""
