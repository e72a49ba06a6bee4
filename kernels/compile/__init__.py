"""`weft aot`: every kernel compiled for named chips, with no GPU.

May import all of `weft.collectives` and `kernels`.
Read `aot_cases` (the launches), `aot`,
`known_spills`.
"""
