"""DTensors beside what else there is: torch's own, FSDP2, optimizers, ColossalAI's notation.

May import all of `dtensor`. `torch_dtensor`, `fully_sharded`, `optimizer_step`, `state_dicts`,
`colossalai`.
"""
