"""What happened, and whether it may: accesses, vector clocks, races, recordings.

May import `sim.errors`. Read `vector_clocks`, `races`, `sites` (where in the source), `recording`
and `replay` (one run checked in many orders), `mutants` (kernels with a planted fault).
"""
