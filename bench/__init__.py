"""Benchmarks: `weft bench --help`."""

if not __name__.startswith("weft."):
    raise ImportError(
        "import weft.bench: the top-level name is not ours. If another package is meant, "
        "install weft (pip install -e .) rather than have its checkout on the path"
    )
