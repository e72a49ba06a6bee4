"""`nn.Module`s and losses made of the fused ops.

May import `weft.collectives` and all other rooms of `kernels` but `compile`. Read `linear`
(ColumnParallelLinear, RowParallelLinear), `split` (which rank has which features), `module` (how
layers save and load their parts), `vocabulary` (embedding, cross-entropy and argmax over a
vocabulary in shards), `experts` (ExpertParallelMLP), `expert_weights` (under which names models
keep what that is made of), `expert_code` (whether a model's own code does the same), `router`
(topk_router, its reference).
"""
