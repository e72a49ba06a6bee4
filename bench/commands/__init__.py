"""Commands that look or time, and are no suite.

May import all of `bench`. `doctor`, `trial` (its ranks), `across` (those of torchrun), `flight`
(its `--flight`), `calibrate`, `explain`, `memory`, `plan`, `tune`, `modelled_launches`.
"""
