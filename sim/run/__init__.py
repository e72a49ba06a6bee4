"""The virtual world, and runs in it.

May import all other rooms of `sim`. Read `runner` (sim.run), `world`, `team` (ranks that call
together), `launches`, `process_group` and `distributed_hooks` (torch.distributed on virtual ranks),
`gpu` (ranks as threads on a GPU), `solo` (one rank's kernels of many).
"""
