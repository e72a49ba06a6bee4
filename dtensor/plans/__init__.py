"""`weft.dtensor.plan`: the layouts of a model on a mesh that are predicted to be the quickest.

May import all of `dtensor` but its own `__init__`. To read in this order: `prices` (what the parts
of a step take; `chip_prices` on a chip that is not at hand), `graph` (the model as a list of
nodes), `propagation` (what layout follows from others), `bills` and `options` (what each node may
do, and its price), `search` (the cheapest of all combinations), `applying` (styles for
`parallelize_module`, and FSDP), `planning` (the function itself), `told` (its table).
"""
