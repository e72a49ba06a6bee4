"""Commands that look or time, and are no suite.

May import all of `bench`. `doctor`, `flight` (its `--flight`), `calibrate`, `explain`, `memory`,
`plan`, `tune`.
"""
