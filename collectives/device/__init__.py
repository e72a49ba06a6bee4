"""What a kernel says to a kernel on another rank: signals, and the arithmetic that kernels share.

May import `collectives.ranks` and `collectives.interpreted`. Read `signals` first: its rules are
what every kernel of weft stands on. It is made of `addresses` (where signals lie), `waits` (bounded
in time) and `failures` (what is left of one); `flagged` words need no signals; `polling` has waits
on the CPU, `stream_signals` the same between launches, `launches` how kernels are launched, and
launched again; `switch` what NVLink adds up; `device_math`.
"""
