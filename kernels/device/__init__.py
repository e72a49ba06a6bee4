"""What the Triton kernels of matmuls are built from.

May import `weft.collectives` and `kernels.engine`. Read `tiles` (the order of tiles, their
product), `operands` (pointers or descriptors), `gathers` (rows that arrive while others are
multiplied), `partial_sums` (tiles sent to their owners), `splits` (few tiles on many programs),
`turns`, `epilogues`.
"""
