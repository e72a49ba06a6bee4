"""Symmetric memory, and the calls that use it.

May import `collectives.ranks` and `collectives.device`. Read `symmetric` (a buffer that every rank
can address), `rendezvous` (how GPUs come by it), `workspace` (two halves, used in turn by the calls
of a channel), `exchange` (a call of the host engine), `direct` (CPU ranks that read each other),
`cuda_graphs`.
"""
