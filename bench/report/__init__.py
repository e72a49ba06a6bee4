"""What is shown of results: tables, plots, the HTML page, comparisons.

May import `bench.rows`, `bench.registry`, `bench.blocks` and `bench.suites`. Read `tables`,
`terminal`, `plots`, `advice`, `html`, `report`, `compare`; `plan` draws one of `weft.dtensor.plan`.
"""
