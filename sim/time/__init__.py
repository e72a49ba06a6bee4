"""Virtual time: what the traced work takes on a chip that is not here.

May import `sim.schedule`'s types. Read `trace`, `hardware`, `clock`, `timeline`, `plot`, `rotation`
(one rank stands for all), `compiling` (what the compiler makes of a kernel); and, in closed form,
`library` (what a user has without weft), `fused`, and `prices` of both, which plans are made by.
"""
