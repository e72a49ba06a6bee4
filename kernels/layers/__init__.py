"""`nn.Module`s and losses made of the fused ops.

May import `weft.collectives` and all other rooms of `kernels` but `compile`. Read `linear`
(ColumnParallelLinear, RowParallelLinear), `module` (how layers save and load their parts),
`vocabulary` (embedding, cross-entropy, argmax over a vocabulary in shards).
"""
