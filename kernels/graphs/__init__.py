"""A pass over torch's graphs: collectives beside matmuls become weft's fused ops.

May import `kernels.custom_ops` and what is below. Read `receipts` (what became of each collective),
`chains` (what stands between a collective and its matmul), `building` (of nodes), `sums` (matmuls
before a collective), `norms` (behind an all_reduce), `rewriting` (the pass; matmuls behind a
collective), `backend` (torch.compile's way to it).
"""
