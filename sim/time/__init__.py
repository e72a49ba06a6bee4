"""Virtual time: what the traced work takes on a chip that is not here.

May import `sim.schedule`'s types and `sim.observer`. Read `trace`, `clock`, `timeline`, `plot`,
`rotation` (one rank stands for all), `compiling` (what the compiler makes of a kernel), and
`levels`, closed forms over several hosts. What chips are: `weft.collectives.prices.hardware`.
"""
