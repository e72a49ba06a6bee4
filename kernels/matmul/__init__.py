"""The fused matmuls: for each op one file of the host's side, and its kernels beside it.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `fused_op`, which all
three ops share; `all_gather`, `gather_engines`, `all_gather_kernel`, `all_gather_launch`,
`contract_kernel` (the weight's gradient) and `copy_engines`; `reduce_scatter` and
`reduce_scatter_kernel`; `all_reduce`, `one_shot_kernel` and `two_shot_kernel`.
"""
