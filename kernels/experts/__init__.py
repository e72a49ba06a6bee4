"""Mixtures of experts: tokens to their experts' ranks, grouped matmuls, results back.

May import `weft.collectives`, `kernels.engine`, `kernels.device` and `kernels.expert_kernels`. Read
`routing` (which rows a rank gets, in what order), `dispatch` and `combine`, the two fused ops, each
the other's gradient; `calls` (what their engines take), `host`, `launched` and `across` (the
engines: `across` is for several hosts), `by_engine` (which of them); then `grouped` (the local
matmul), `rows` (how rows move through symmetric memory on a CPU, and by collectives) and
`custom_ops` (all of it in graphs).
"""
