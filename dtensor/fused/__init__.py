"""Calls that run as fused kernels, caught above autograd.

May import the rooms `layout`, `move`, `tracing`, `dispatch` and `rules` of `dtensor`, and
`dtensor.tensor`. Read `functional` (which calls are caught), `products` (those that multiply),
`linear` (how they run), `grouped` (those of experts), `attention`, `loss`, `context_parallel`.
"""
