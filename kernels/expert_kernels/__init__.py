"""The kernels of mixtures of experts: dispatch, combine, and the gradient of experts' weights.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `expert_tiles` (whose
tiles all of them work on), `dispatch_kernel`, with how rows come to it in `pulled_rows`, and
`combine_kernel`; `dispatch_launch` and `combine_launch` launch these. `contract_grouped_kernel`
makes weights' gradients, on one rank.
"""
