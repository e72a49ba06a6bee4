"""The Triton kernels of attention, and the geometry of a sharded sequence.

May import `weft.collectives`, `kernels.engine` and `kernels.device`. Read `geometry` (who holds
which tokens, who sees whom), `attention_tiles`, `ring_call` (launch and
tables), `ring_keys` (keys that arrive), `ring_kernel`, `ring_grad_kernel` and `ring_dkv`;
`head_units`, `heads_kernel` and `heads_grad_kernel` (heads exchanged for tokens); `decode_tiles`
and `decode_kernel`.
"""
