"""What several suites time.

May import `bench.problem` and `bounds`. Read `tensor_parallel` (blocks of models),
`context_parallel`, `causal` (an oracle, and torch's own), `decode`, `virtual` (ranks in virtual
time).
"""
