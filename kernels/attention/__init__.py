"""Attention over sharded sequences: for each op the checks, the engines and the gradient.

May import `weft.collectives`, `kernels.engine`, `kernels.flash` and `kernels.heads`. Read
`ring`, `host` and `generic` (its engines), `ulysses`, `cache`, `decode` and `decode_host`,
`custom_ops` (torch.ops.weft).
"""
