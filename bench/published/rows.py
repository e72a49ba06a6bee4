"""Published figures: a CSV of one measurement a line, and what its cells mean.

    source,gpu,world,op,M,N,K,dtype,what,value,unit,note

M is the number of all ranks' rows; (M, K) @ (K, N) is one rank's product; a collective is of an
(M, N) whole. `what` names the implementation. Cells are people's words: what is not understood
makes a row inexpressible and says why, and never fails.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from weft.collectives.prices.hardware import PRESETS, Hardware
from weft.collectives.prices.library import held_to
from weft.errors import printable

COLUMNS = ("source", "gpu", "world", "op", "M", "N", "K", "dtype", "what", "value", "unit", "note")
SHIPPED = Path(__file__).parent / "published.csv"


class InexpressibleError(Exception):
    """Why the model says nothing about a row."""


@dataclass(frozen=True)
class Row:
    """A line as it stands in the file. Properties raise `InexpressibleError` if it is unclear."""

    source: str
    gpu: str
    world: str
    op: str
    M: str
    N: str
    K: str
    dtype: str
    what: str
    value: str
    unit: str
    note: str

    @property
    def text(self) -> str:
        """What is told of the measurement, in lower case."""
        return f"{self.what}; {self.note}".lower()

    @property
    def ranks(self) -> int:
        """GPUs that took part."""
        return _stated_count(self.world, "world")

    def size(self, name: str) -> int:
        """M, N or K."""
        return _stated_count(getattr(self, name), name)

    def sizes(self, *names: str) -> tuple[int, ...]:
        """Several of them."""
        return tuple(map(self.size, names))

    @property
    def published(self) -> float:
        """The value."""
        try:
            value = float(self.value)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise InexpressibleError(f"the value is no positive number: {self.value!r}")
        return value

    @property
    def element(self) -> str:
        """The dtype as `Hardware.flops` names it; half precision where none is given."""
        found = _DTYPES.get(self.dtype.lower().replace("-sized", "").replace("torch.", ""))
        if found is None:
            raise InexpressibleError(f"no rate for operands of {self.dtype!r}")
        return found

    @property
    def itemsize(self) -> int:
        """Bytes of an element that travels."""
        return {"float8": 1, "float32": 4, "float64": 8}.get(self.element, 2)

    @property
    def is_fitted_on(self) -> bool:
        """Whether it is of the half of problems that constants were fitted to, and not held out.

        All implementations of a problem of a source are on one side.
        """
        problem = "|".join((self.source, self.op, self.M, self.N, self.K))
        return hashlib.sha256(problem.encode()).digest()[0] % 2 == 0


_DTYPES = {
    **dict.fromkeys(("", "half", "bf16", "bfloat16", "fp16", "float16", "f16"), "bfloat16"),
    **dict.fromkeys(("fp8", "float8", "e4m3", "fp8_e4m3", "float8_e4m3fn"), "float8"),
    **dict.fromkeys(("fp32", "float32", "f32", "float"), "float32"),
    **dict.fromkeys(("tf32",), "tf32"),
    **dict.fromkeys(("fp64", "float64", "double"), "float64"),
}  # fmt: skip


def _stated_count(cell: str, name: str) -> int:
    cell = cell.strip()
    if not cell:
        raise InexpressibleError(f"{name} is not stated")
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not (1 <= number < 2**48 and number == int(number)):
        raise InexpressibleError(f"{name} is no count: {cell!r}")
    return int(number)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file. Columns may be in any order, others are ignored.

    Raises:
        ValueError: no such file, or no such table.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}: the first line must name "
                    f"{','.join(COLUMNS)}"
                )
            return [
                Row(*(printable((line[name] or "").strip()) for name in COLUMNS)) for line in table
            ]
    except (OSError, UnicodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error


# Parts of the same chip with other memory count as the preset.
_NAMES = {
    "gb300": "b300", "gb200": "gb200-nvl72", "mi355x": "mi355x", "mi308x": "mi308x",
    "mi300x": "mi300x", "mi325x": "mi300x", "gh200": "h100",
    "h200": "h200", "h800": "h800", "h100": "h100", "h20": "h20",
    "b300": "b300", "b200": "b200", "a100": "a100",
}  # fmt: skip
# Parts with fewer cores, or on no NVLink.
_OTHER_PARTS = ("pcie", "nvl", "40gb", "a100x", "mig")
# Memory of the first H100s at 500 W: 2.0 TB/s.
_HBM2E = 2.0e12


def row_hardware(row: Row) -> Hardware:
    """The preset that a row's `gpu` names, held to the power and with the memory that it states."""
    name = row.gpu.lower()
    words = re.findall(r"[a-z0-9]+", name)
    # 8xH200-141GB is one, H2000 is not.
    found = next(
        (
            preset
            for part, preset in _NAMES.items()
            if re.search(rf"\b(\d+x)?{part}(x\d+)?\b", name)
        ),
        None,
    )
    if found is None:
        raise InexpressibleError(f"no preset for {row.gpu or 'an unnamed GPU'}")
    other = next((part for part in _OTHER_PARTS if part in words), None)
    if other:
        raise InexpressibleError(f"no preset for {row.gpu}: {other} is another part")
    hardware = PRESETS[found]
    if "hbm2e" in words and found == "h100":
        hardware = replace(hardware, hbm_bandwidth=_HBM2E)
    watts = re.search(r"(\d+)\s*w\b", name)
    if watts and found in ("h100", "h200", "h800"):
        hardware = held_to(hardware, float(watts[1]))
    return hardware


_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def row_bytes(row: Row) -> float:
    """The whole array of a collective: (M, N), or the size that the words state.

    Of a size "a rank", an all-gather's and a reduce-scatter's whole has one for each.
    """
    if row.M and row.N:
        return float(row.size("M") * row.size("N") * row.itemsize)
    stated = re.search(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b\b(\s*(?:a|per|/)\s*(?:rank|gpu))?", row.text)
    if stated is None:
        raise InexpressibleError("the size is not stated")
    nbytes = float(stated[1]) * _UNITS[stated[2]]
    if not 1 <= nbytes < 2**48:
        raise InexpressibleError(f"the size is out of range: {stated[0]}")
    each = bool(stated[3]) and "reduce" not in op_words(row.op).replace("reduce_scatter", "")
    return nbytes * (row.ranks if each else 1)


def op_words(op: str) -> str:
    """An op in the words of `weft.collectives`: AG + GEMM as all_gather + matmul."""
    text = op.lower()
    for pattern, word in _WORDS:
        text = re.sub(pattern, word, text)
    return re.sub(r"\s+", " ", text).strip()


_WORDS = (
    (r"all[\s_-]?gather|\bag\b(?!e)", "all_gather"),
    (r"reduce[\s_-]?scatter|\brs\b", "reduce_scatter"),
    (r"all[\s_-]?reduce|\bar\b", "all_reduce"),
    (r"all[\s_-]?to[\s_-]?all|\ba2a\b", "all_to_all"),
    (r"\bgemm\b|\bmatrix multiplication\b|\bmm\b", "matmul"),
    (r"\b(ag)_", "all_gather_"), (r"\b(gemm)_", "matmul_"),
    (r"_(rs)\b", "_reduce_scatter"), (r"_(ar)\b", "_all_reduce"), (r"_(gemm)\b", "_matmul"),
    (r"rms[\s_-]?norm", "rms_norm"),
)  # fmt: skip
