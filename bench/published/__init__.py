"""Published figures beside the model's: `weft bench published --help`.

May import all of `bench` but its commands. Read `rows` (what a line of the CSV
means), `predict` (a function for each family of ops, and the halves of the rows), then `times`,
`matmuls`, `sums`, `attention`, `experts` (the families); `command`, `plot`; `never_slower` (what
`auto` takes, beside the best).
"""
