"""The suites of `weft bench`, one a file: its cases, and how a rank prepares one.

May import `bench.problem`, `bounds`, `shapes`, `rows` and `bench.blocks`. Read `ops`, then
`collectives`, `redistribute`, `dispatch`, `mlp`, `layers`, `experts`, `attention`, `loss`,
`model`, `plan`, `scaling`.
"""
