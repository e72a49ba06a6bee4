"""Commands that look or time, and are no suite.

May import all of `bench`. `doctor`, `across` (its ranks of torchrun), `flight` (its `--flight`),
`calibrate`, `explain`, `memory`, `plan`, `tune`, `modelled_launches`.
"""
