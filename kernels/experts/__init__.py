"""Mixtures of experts: tokens to their experts' ranks, grouped matmuls, results back.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `routing` (which rows a
rank gets, in what order), `dispatch` and `combine`, the two fused ops, each the other's gradient;
`grouped` (the local matmul), `host_rows` (rows through symmetric memory on a CPU),
`generic_rows` (the same by collectives), and `custom_ops` (all of it in graphs).
"""
