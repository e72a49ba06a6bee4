"""The Triton kernels of attention by ring and to caches, and the geometry of a sharded sequence.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `geometry` (who holds
which tokens, who sees whom), `attention_tiles`, `ring_call` (launch and tables), `ring_keys` (keys
that arrive), `ring_kernel`, `grad_tiles`, `ring_grad_kernel` and `ring_dkv`; `decode_tiles` and
`decode_kernel`.
"""
