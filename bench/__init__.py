"""Benchmarks: `weft bench --help`."""

if not __name__.startswith("weft."):
    raise ImportError("import weft.bench: the top-level name is not ours")
