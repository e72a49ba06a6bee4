"""Mixtures of experts: tokens to their experts' ranks, grouped matmuls, results back.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `routing` (which rows a
rank gets, in what order), `dispatch` and `combine`, the two fused ops, each the other's gradient;
`grouped` (the local matmul), `rows` (how rows move through symmetric memory on a CPU, and by
collectives) and `custom_ops` (all of it in graphs). The kernels of `dispatch_kernel` and
`combine_kernel`, launched by `expert_launch`, and of `contract_grouped_kernel`, the gradient of
weights, work on the tiles of `expert_tiles`; `pulled_rows` has how rows come to them.
"""
