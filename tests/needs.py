"""What some tests need that not every machine has."""

import pytest

from weft.collectives.device import signals

_ready, _why = signals.interpreter_ready()
needs_interpreter = pytest.mark.skipif(not _ready, reason=_why)
