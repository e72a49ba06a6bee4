"""Who runs next: ranks switch where they wait, in an order that a seed picks.

May import `sim.check`, `sim.time` and `sim.errors`. Read `scheduler`, `schedules`, `player` (an
order played again), `untimed`.
"""
