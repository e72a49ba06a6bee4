"""What all fused ops share on the host: engines and their prices, chips, launches, local matmuls.

May import `weft.collectives`. Read `engines` (which of triton, host and generic runs a call),
`fused_times` (what kernels take, in closed form), `plans` (what a call comes to, kept), `chips`,
`tuning` and `kernel_rates` (launches and rates from tables), `local_matmul`, `shards` (what the
host engines do alike), `epilogues` (activations, on torch's side), `replicated`, `fp8`, `autocast`.
"""
