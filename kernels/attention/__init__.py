"""Attention over sharded sequences: for each op the checks, the engines and the gradient.

May import `weft.collectives`, `kernels.engine`, `kernels.flash` and `kernels.heads`. Read `plan`
(the checks), `ring`, `host` and `generic` (its engines), `library` (torch's kernels) and
`merge_kernel`, `ulysses` and `swaps`, `cache`, `decode` and `decode_host`, `custom_ops`
(torch.ops.weft).
"""
