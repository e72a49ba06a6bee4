"""Symmetric memory, and the calls that use it.

May import `collectives.ranks` and `collectives.device`. Read `symmetric` (a buffer that every rank
can address), `backends` (where its memory comes from), `rendezvous` (how GPUs come by it), `waiter`
(signals between CPU ranks), `workspace` (two halves, used in turn by the calls of a channel),
`exchange` (a call of the host engine), `repeatable` (calls that go straight to their launches),
`checks` (what WEFT_CHECK=1 compares), `direct` (CPU ranks that read each other), `cuda_graphs`.
"""
