"""The sum over ranks, the residual and the RMS norm between two tensor-parallel blocks.

May import `weft.collectives` and `kernels.engine`. Read `rms_norm`, then `all_reduce_norm`,
`rms_norm_kernel`, `team_rows` (what its programs do with rows), `switched_rows` (what the NVLink
switch does for them), `flagged_norm_kernel` (the ops without signals) and `rms_norm_launch`;
`custom_ops` registers both with torch.library.
"""
