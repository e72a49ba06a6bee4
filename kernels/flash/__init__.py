"""The Triton kernels of attention by ring and to caches, and the geometry of a sharded sequence.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `geometry` (who holds
which tokens, who sees whom), `ring_tables` (the same for kernels), `attention_tiles`, `ring_call`
(launch), `ring_keys` (keys that arrive), `ring_kernel`, `grad_tiles`, `ring_dkv` and
`ring_grad_kernel`; `decode_tiles`, `decode_kernel` and `append_kernel`.
"""
