"""How the interpreter, the host's memory and its signals are watched.

May import `sim.check`, `sim.time` and `sim.schedule`. Read `interpreter_hooks`, `host_access`,
`host_ops`, `host_signals`, `timing_hooks`.
"""
