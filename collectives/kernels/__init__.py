"""The Triton kernels of the collectives.

May import the rooms `ranks`, `device` and `memory` of `collectives`, and its `protocols`. Read
`kernel_collectives` (one-shot and two-shot collectives), `pieces` (what they send and add up),
`flagged_reduce` (sums without signals), `collective_launch`, `pull` (redistribution: each rank
takes its boxes), `pull_boxes` (their tables), `multimem` (sums by the NVLink switch).
"""
