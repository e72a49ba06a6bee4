"""`weft bench solo`: one rank's true kernels of a group of W, on a whole chip.

May import all of `bench` but its commands. Read `cases`, `measure`, `command`, `page`, then
`compiling` (ahead, in processes), `rates` (of kernels, for the cost model), `sweep` (tuned
launches), `attention_tiles` (a search to be read); `local_matmul` and `local_attention` are suites
of their own, which `tools.gpu` runs.
"""
