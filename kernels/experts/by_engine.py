"""Which module runs dispatch and combine, by the engine that was chosen."""

from __future__ import annotations

from types import ModuleType

from weft.kernels.engine.engines import RunnableEngine


def engine_module(engine: RunnableEngine) -> ModuleType:
    """Where the forward and backward of both ops are: `host`, `across`, or `launched`, which needs
    Triton.
    """
    if engine == "hosts":
        from weft.kernels.experts import across

        return across
    if engine == "host":
        from weft.kernels.experts import host

        return host
    from weft.kernels.experts import launched

    return launched
