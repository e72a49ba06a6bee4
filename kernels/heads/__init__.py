"""The Triton kernels of attention by heads: heads exchanged for tokens, in one launch.

May import `weft.collectives`, `kernels.engine`, `kernels.device` and `kernels.flash`, whose tiles
and keys they are made of. Read `head_units` (who makes what, and how results go home) and
`heads_kernel`; `head_queries`, `head_dkv` and `heads_grad_kernel`.
"""
