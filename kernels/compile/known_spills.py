"""Local memory that kernels are known to use; everything else has none, or `weft aot` fails.

Where looked at, and unless told, it holds scalars and addresses that are used on both sides of an
inner loop: they are stored before it and loaded after it, once a tile.
"""

from __future__ import annotations

# In bf16, by Triton 3.6, 3.7 or 3.9, whichever spills more.
_BYTES = {
    ("sm_90", "all_gather_matmul_kernel", "gate and up"): 56,  # by 3.9 alone
    ("sm_90", "dispatch_kernel", "experts, kept"): 80,  # by 3.9; 16 and 32 by the others
    ("sm_80", "_head_attention_backward_kernel", "attention by heads, D 256"): 16,
    # Addresses of results. Made anew after the loop, from numbers of the tile that the compiler
    # cannot know, they spill 0, 0 and 32, and a step is scheduled in up to 7 % more cycles.
    ("sm_90", "_head_attention_kernel", "attention by heads, D 256"): 24,
    ("sm_90", "_head_attention_kernel", "attention by heads, window"): 32,
    ("sm_90", "_head_attention_kernel", "attention by heads, D 64, packed"): 40,
}
# Gradients on sm_90, by the width of heads. Of 128, also in the loop over queries: quicker
# nevertheless, see `ring_grad_kernel`.
_GRADIENTS = {
    ("_ring_attention_backward_kernel", 64): 8,
    ("_ring_attention_backward_kernel", 128): 352,
    ("_head_attention_backward_kernel", 64): 72,
    ("_head_attention_backward_kernel", 128): 408,
}


def known_spills(arch: str, dtype: str, kernel: str, case: str, block_d: int) -> int:
    """Bytes of a case of `aot_cases`, whose heads are up to `block_d` wide if it is attention."""
    if kernel == "_numbers_kernel" and arch in ("sm_80", "sm_90"):
        # By 3.6 and 3.7, which give it 48 registers: 8 bytes, 16 in fp16. With half as many rows a
        # tile of 256 columns spills none on sm_90, but one of 128 spills 16.
        return {128: 8, 256: 16}.get(block_d, 0)
    if dtype == "float32":
        # Some scalars around multiply-adds unrolled 256 times, whatever the warps: 8 to 24 of 8.
        if "attention_backward" in kernel and block_d > 128:
            return 64
        return 8 if "decode" in kernel and block_d > 256 else 0
    if arch == "sm_90" and (found := _GRADIENTS.get((kernel, block_d))):
        return found
    return _BYTES.get((arch, kernel, case), 0)
