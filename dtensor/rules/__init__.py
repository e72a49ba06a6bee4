"""How ops act on layouts: a rule an op or a family of ops, registered when its file is imported.

May import the rooms `layout`, `move`, `tracing`, `dispatch` of `dtensor`, `dtensor.random` and
`dtensor.tensor`. Start with `pointwise`, then `reduce`, `matmul`, `products` (and what is fused of
them), `view`; `attention`, `index`, `window`, `norm`, `nn`, `loss`, `random`.
"""

from weft.dtensor.rules import attention as attention
from weft.dtensor.rules import index as index
from weft.dtensor.rules import loss as loss
from weft.dtensor.rules import matmul as matmul
from weft.dtensor.rules import nn as nn
from weft.dtensor.rules import norm as norm
from weft.dtensor.rules import pointwise as pointwise
from weft.dtensor.rules import products as products
from weft.dtensor.rules import random as random
from weft.dtensor.rules import reduce as reduce
from weft.dtensor.rules import view as view
from weft.dtensor.rules import window as window
