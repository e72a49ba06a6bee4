"""An op on DTensors: from the call to the plan that is kept for the next one.

May import `dtensor.layout`, `move`, `tracing`, `dtensor.random` and `dtensor.tensor`. Read
`dispatch`, `call` (an op with the layouts of its arguments), `planning` (its plan), `local_ops`
(what it runs on each rank), `pricing` (candidates, prices, choice), `discovery` (ops without a
rule), `variants` and `views`, `backward`, `cross_mesh`, `agreement` (what all ranks must answer
alike).
"""
