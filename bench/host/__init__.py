"""`weft bench host`: what the host takes to enqueue a call, on a driver that runs nothing.

May import all of `bench` but its commands. Read `driver` (stub_cuda.c is what it loads), `calls`,
`measure`, `add_kernel`, `command`.
"""
