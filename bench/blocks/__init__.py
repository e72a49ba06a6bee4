"""What several suites time.

May import `bench.problem` and `bounds`. Read `tensor_parallel` (blocks of models),
`context_parallel`, `decode`, `virtual` (ranks in virtual time).
"""
