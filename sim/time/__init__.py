"""Virtual time: what the traced work takes on a chip that is not here.

May import `sim.schedule`'s types. Read `trace`, `clock`, `timeline`, `plot`, `rotation` (one rank
stands for all), `compiling` (what the compiler makes of a kernel); and closed forms: `prices`, that
plans are made by, and `levels`, over several hosts. What chips are:
`weft.collectives.prices.hardware`.
"""
