"""From one layout to another.

May import `dtensor.layout`. Read `transfers` (who takes which piece from whom), `redistribute`,
`combining` (what was taken), `collective_plans` (steps of collectives where no symmetric memory
reaches), `host_plans` and `host_moves` (over several hosts), `explicit` (who asked), `local_parts`
(from_local, to_local), `custom_ops` (torch.ops.weft) and `graph_names` (layouts in graphs).
"""
