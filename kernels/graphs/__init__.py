"""A pass over torch's graphs: collectives beside matmuls become weft's fused ops.

May import `kernels.custom_ops` and what is below. Read `receipts` (what became of each collective),
`chains` (what stands between a collective and its matmul), `building` (of nodes), `gathers` (and
the matmuls behind them), `sums` (and the matmuls before them), `norms` (behind an all_reduce),
`merging` (sums that are added up), `attention` (to keys that are gathered), `losses` (of sharded
logits), `experts` (rows that go to them), `backend` (the pass, and the way of torch.compile to it).
"""
