"""What only the repository needs, not installed: runs on GPUs, pages of figures, README's table.

Run from the repository's root: `python -m tools.gpu`. May import all of weft.
"""
