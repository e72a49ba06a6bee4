"""Benchmarks: `weft bench --help`.

May import all of weft; of `weft.sim` what plays launches on chips that are not here. Read `rows`
(results), `measure` and `bounds` (how they are made, and what they are held against), `blocks` and
`suites` (what is timed), `report` (what is shown), `runner`, `cli`; `published`, `solo` and `host`
are commands of their own.
"""

if not __name__.startswith("weft."):
    raise ImportError(
        "import weft.bench: the top-level name is not ours. If another package is meant, "
        "install weft (pip install -e .) rather than have its checkout on the path"
    )
