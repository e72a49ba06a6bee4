"""What the Triton kernels of matmuls are built from.

May import `weft.collectives` and `kernels.engine`. Read `tiles` (the order of tiles, their
product), `operands` (pointers or descriptors), `gathers` (rows that arrive while others are
multiplied; by `copies`), `gathered_rows` (where a tile finds them), `flattened` (the tiles of a
program in one loop) and `gathered_tiles` (both together), `partial_sums` (how tiles travel to their
owners), `summed_tiles` (what the kernels that add up such tiles share), `splits` (few tiles on many
programs), `turns`, `outputs` (from sums to what is stored).
"""
