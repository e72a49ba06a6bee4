"""The suites of `weft bench`, one a file: its cases, and how a rank prepares one.

May import `bench.problem`, `bounds`, `shapes`, `rows` and `bench.blocks`. Read `ops`, then
`matmul`, `collectives`, `redistribute`, `dispatch`, `mlp`, `layers`,
`attention`, `loss`, `model`, `plan`, `scaling`.
"""
