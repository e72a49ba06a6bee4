"""A pass over torch's graphs: collectives beside matmuls become weft's fused ops.

May import `kernels.custom_ops` and what is below. Read `receipts` (what became of each collective),
`chains` (what stands between a collective and its matmul), `rewriting` (the pass), `backend`
(torch.compile's way to it).
"""
