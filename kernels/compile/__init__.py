"""`weft aot`: every kernel compiled for named chips, with no GPU.

May import all of `weft.collectives` and `kernels`. Read `aot_cases` (the launches), `machine_code`,
`aot`, `known_spills`; `aot_loop` (the main loops, read off machine code), `loop_clock` (how long a
step of one takes) and `plain`, the kernels that ours are compared to there.
"""
