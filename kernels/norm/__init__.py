"""The sum over ranks, the residual and the RMS norm between two tensor-parallel blocks.

May import `weft.collectives` and `kernels.engine`. Read `rms_norm`, then
`all_reduce_norm`, `rms_norm_kernel` and `rms_norm_launch`.
"""
