"""`make gpu`: proofs and figures on GPUs, in slices of minutes, which --resume goes on with.

Run as `python -m tools.gpu`. Read `steps` (what there is to run), `__main__` (the slices, each step
a process), `process` (a step's), `ranks` (as threads), `cases` (the calls), `compile` (kernels
ahead of them), `figures` (timings), `report` (what is written as it comes) and `page` (docs/gpu.md
of all that).
"""
