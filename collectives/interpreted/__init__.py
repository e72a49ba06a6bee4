"""What Triton's interpreter is helped with: that it runs, and takes less time.

Imports nothing of ours. Read `interpreter`, then `fast_integers` (a kernel's arithmetic on integers
and pointers).
"""
