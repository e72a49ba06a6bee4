"""What happened, and whether it may: accesses, vector clocks, races, recordings.

May import `sim.errors` and `sim.observer`. Read `vector_clocks`, `regions` (of memory), `races`,
`sites` (where in the source), `recording` and `replay` (one run checked in many orders).
"""
