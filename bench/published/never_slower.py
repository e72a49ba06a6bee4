"""`weft bench never-slower`: what `auto` takes, beside the best that the model knows of.

For every fused matmul, collective and ring attention, M = 1 ... 16384, four models, 2, 4 and 8
ranks and four chips: the time of what `auto` runs over that of the best of weft's engines and
launches, and of a library's matmul and collective (NCCL, NVLS, torch's one and two shots, async-TP)
or attention in zigzag order (behind a ring's sends, or after an all-gather), all by the closed
forms of `weft.kernels.engine.fused_times` and `weft.collectives`. Other tiles are left out where a
shipped table has what was played of the likeliest ones. Nothing runs; half precision, each rank its
share of a feed-forward layer, or of one causal sequence.

Sums are compared twice: as `auto` makes them, each term in 24 bits or more and added up in rank
order, with what makes them so; and as a caller gets them who asks for less, with wire_dtype=
torch.bfloat16 and WEFT_MULTIMEM=1, with everything: libraries round each term to half precision,
and add up in an order of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from weft.bench import shapes
from weft.bench.report.tables import figure
from weft.collectives import protocols
from weft.collectives.kernels.collective_launch import quickest_way
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware, named
from weft.collectives.protocols import Collective
from weft.kernels.engine import engines, fused_times, tuning
from weft.kernels.engine.chips import Tiling, known
from weft.markdown import between_marks, markdown_lines, page_with

CHIPS = ("h100", "h200", "b200", "mi300x")
MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b", "qwen2-72b")
RANKS = (2, 4, 8)
ROWS = tuple(1 << i for i in range(15))
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ATTENTION = "ring_attention"
OPS = (*tuning.OPS, *COLLECTIVES, ATTENTION)
_SUMS = ("matmul_reduce_scatter", "matmul_all_reduce", "all_reduce", "reduce_scatter")
_DTYPE = torch.bfloat16
_MARK = "never-slower"


class Asked(NamedTuple):
    """What `auto` runs, the best of all candidates, and the times of both in us."""

    auto: str
    auto_us: float
    best: str
    best_us: float

    @property
    def ratio(self) -> float:
        """What `auto` takes of the best one's time."""
        return self.auto_us / self.best_us


@dataclass(frozen=True)
class AutoChoice:
    """One problem: what `auto` runs, and the best of all candidates. Times in us.

    Attributes:
        M, N, K: one rank's product; of a collective its whole array (M, N), and K = 0; of attention
            all tokens, and the features of an output and of a key.
        auto, best: an engine, of which `auto` chooses one; "library, NVLS" and the like; or a
            launch that the kernel does not take: a way to move data, or tiles.
        asked: the same where half precision and the switch's order are asked for; of what adds up
            nothing, the same.
    """

    op: str
    chip: str
    ranks: int
    model: str
    M: int
    N: int
    K: int
    auto: str
    auto_us: float
    best: str
    best_us: float
    asked: Asked

    @property
    def ratio(self) -> float:
        """What `auto` takes of the best one's time."""
        return self.auto_us / self.best_us


def compared(
    ops: Sequence[str] = OPS,
    chips: Sequence[str] = CHIPS,
    ranks: Sequence[int] = RANKS,
    models: Sequence[str] = MODELS,
    rows: Sequence[int] = ROWS,
) -> Iterator[AutoChoice]:
    """Every problem of the grid."""
    for op in ops:
        for chip in chips:
            for W in ranks:
                for model in models:
                    for M in rows:
                        if op != ATTENTION or M >= 2 * W:  # a rank has two chunks
                            yield _auto_choice(op, chip, W, model, M)


def _auto_choice(op: str, chip: str, W: int, model: str, M: int) -> AutoChoice:
    layer, hardware = shapes.MODELS[model], named(chip)
    share = -(-layer.ffn // W)
    if op in COLLECTIVES:
        N, K = layer.hidden, 0
    elif op == ATTENTION:
        N, K = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    else:
        N, K = (share, layer.hidden) if op == "all_gather_matmul" else (layer.hidden, share)

    def of(asked: bool) -> Asked:
        if op in COLLECTIVES:
            auto, us = collective_choice(op, M * N * 2, hardware, W, asked=asked)
        elif op == ATTENTION:
            auto, us = attention_choice(layer, M, hardware, W)
        else:
            auto, us = fused_choice(op, M, N, K, hardware, W, asked=asked)
        best = min(us, key=lambda name: us[name])
        return Asked(auto, us[auto], best, us[best])

    return AutoChoice(op, hardware.name, W, model, M, N, K, *of(False), of(True))


def fused_choice(
    op: str, M: int, N: int, K: int, hardware: Hardware, W: int, *, asked: bool = False
) -> tuple[str, dict[str, float]]:
    """The engine that `auto` takes, and the times of all candidates.

    Args:
        asked: whether sums may travel in half precision and be added up by the switch.
    """
    sums = op != "all_gather_matmul"
    wire = _DTYPE if sums and asked else None
    moved = M * K * 2 * (W - 1) // W if not sums else M * N * 4 * (W - 1)
    told = 0 if sums else N  # ranks that gather tell each other their columns
    problem = engines.Problem(op, M, N, K, _DTYPE, moved, wire_dtype=wire, most_own=told)
    regrets = engines.regrets(problem, hardware, W, asked)
    us = {
        "triton": engines.kernel_time(problem, hardware, W, asked).us,
        "generic": sum(part.us for part in engines.unfused_parts(problem, hardware, W, asked)),
    }
    if asked or not sums:
        unfused = library.unfused_us(op, M, N, K, "bfloat16", hardware, W)
        us |= {f"library, {way}": each for way, each in unfused.items()}
    chip = known(hardware.chip)
    key = tuning.key_of(op, M, N, 0 if sums else K, _DTYPE, W)
    played = key in tuning.load(str(tuning.OWN_FOLDER), hardware.chip)
    launched = fused_times.launched_way(op, chip, M, N, K, _DTYPE, W)
    for way in fused_times.ways(op, W):
        made = fused_times.fused_time(op, M, N, K, "bfloat16", hardware, W, way, wire=wire)
        us[way] = made.us
        for tiling in _tiles(hardware.chip) if way != launched or not played else ():
            name = f"{way}, {tiling.block_m}x{tiling.block_n}"
            made = fused_times.fused_time(
                op, M, N, K, "bfloat16", hardware, W, way, tiling, wire=wire
            )
            us[name] = made.us
    return min(regrets, key=lambda engine: regrets[engine]), us


def attention_choice(
    layer: shapes.Model, tokens: int, hardware: Hardware, W: int
) -> tuple[str, dict[str, float]]:
    """What `auto` takes for a causal sequence in zigzag order, and all candidates."""
    mine, D = -(-tokens // W), layer.head_dim
    work = fused_times.AttentionWork(
        1, layer.heads, D, mine, tokens, seen=tokens, parts=W, documents=1, causal=True
    )
    moved = 4 * layer.kv_heads * D * (tokens - tokens // W)
    M, N = layer.heads * mine, max(1, tokens // 2)
    problem = engines.Problem(ATTENTION, M, N, 2 * D, _DTYPE, moved, attention=work)
    prices = engines.attention_prices(problem, work, hardware, hardware.rates(), W)
    us = {engine: price.us for engine, price in prices.items()}
    auto = min(prices, key=lambda engine: prices[engine].score)
    unfused = library.zigzag_attention_us(
        hardware, fused_times.library_attention(hardware), hardware.fabric(W), batch=1,
        tokens=tokens, heads=layer.heads, kv_heads=layer.kv_heads, head_dim=D,
    )  # fmt: skip
    return auto, us | {f"library, {way}": each for way, each in unfused.items()}


@lru_cache(maxsize=8)
def _tiles(chip: str) -> list[Tiling]:
    """What `weft tune` would try, by the sizes of blocks."""
    tried = tuning.candidates(known(chip), _DTYPE, Tiling(128, 128, 64))
    found = {(c.tiling.block_m, c.tiling.block_n): c.tiling for c in tried if c.tiling}
    return list(found.values())


def collective_choice(
    op: Collective, nbytes: int, hardware: Hardware, W: int, *, asked: bool = False
) -> tuple[str, dict[str, float]]:
    """What `auto` takes for a collective whose whole array has `nbytes`, and all candidates.

    Args:
        asked: whether the switch may add up.
    """
    fabric = hardware.fabric(W)
    piece = nbytes if op == "all_reduce" else -(-nbytes // W)
    config = engines.collective_config_on(hardware, op, piece, W)
    switch = asked or op == "all_gather"
    us = {"library, NCCL": protocols.nccl_us(op, nbytes, fabric)}
    for by_words in (False, True) if config.by_words else (False,):
        for two_shot in (False, True) if op == "all_reduce" and W > 2 else (False,):
            name = protocols.shots_in_words(two_shot, by_words)
            us[name] = protocols.kernel_us(op, nbytes, fabric, two_shot=two_shot, by_words=by_words)
    if switch and fabric.multicast and op != "all_to_all":
        us["library, NVLS"] = protocols.switch_us(op, nbytes, fabric, in_graph=True)
    kernel = protocols.shots_in_words(config.two_shot, config.by_words)
    way, _, _ = quickest_way(op, piece, fabric, config, switch=switch)
    names = {"triton": kernel, "switch": "library, NVLS", "generic": "library, NCCL"}
    return names[way], us


def main(argv: Sequence[str] | None = None) -> int:
    """Print the worst of each op, chip and number of ranks. Exit status 1 where --check fails."""
    parser = argparse.ArgumentParser(
        prog="weft bench never-slower",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="every problem, as a JSON list")
    parser.add_argument("--all", action="store_true", help="also a line for each that is slower")
    parser.add_argument(
        "--check", type=float, metavar="RATIO", help="fail where auto takes more of the best"
    )
    parser.add_argument(
        "--page",
        type=page_with(_MARK),
        metavar="PAGE",
        help="write the summary into this Markdown file, between its marks",
    )
    parser.add_argument("--ops", default=",".join(OPS), help=f"(default {','.join(OPS)})")
    args = parser.parse_args(argv)
    if unknown := set(args.ops.split(",")) - set(OPS):
        parser.error(f"ops must be of {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    if args.check is not None and not 0 < args.check < math.inf:
        parser.error(f"--check must be above 0 and finite, got {args.check:g}")
    found = list(compared(args.ops.split(",")))
    limit = args.check or 1.05
    table = "\n".join(choice_lines(found, limit))
    if args.page:
        args.page.write_text(between_marks(args.page.read_text(), _MARK, table))
    if args.json:
        told = [
            asdict(each)
            | {"ratio": each.ratio}
            | {"asked": each.asked._asdict() | {"ratio": each.asked.ratio}}
            for each in found
        ]
        print(json.dumps(told, indent=1))
    else:
        print(table)
        for each in found if args.all else ():
            for how, made in (("", _as_is(each)), (" (asked)", each.asked)):
                if made.ratio > limit and (not how or each.op in _SUMS):
                    print(
                        f"{made.ratio:.2f}{how} {each.op} {each.model} M={each.M} {each.ranks} x "
                        f"{each.chip}: {made.auto} {figure(made.auto_us)} us, {made.best} "
                        f"{figure(made.best_us)}"
                    )
    worst = max(found, key=lambda each: each.ratio)
    if args.check and worst.ratio > args.check:
        print(f"auto takes up to {worst.ratio:.2f} of the best, limit {limit:g}", file=sys.stderr)
        return 1
    return 0


def choice_lines(found: Sequence[AutoChoice], limit: float = 1.05) -> list[str]:
    """A line for each op and chip, as Markdown."""
    lines = []
    for op, chip in dict.fromkeys((each.op, each.chip) for each in found):
        mine = [each for each in found if (each.op, each.chip) == (op, chip)]
        line = [
            op,
            chip,
            str(len(mine)),
            *_choice_cells(mine, [_as_is(each) for each in mine], limit),
        ]
        asked = (
            _choice_cells(mine, [each.asked for each in mine], limit) if op in _SUMS else [""] * 4
        )
        lines.append((*line, *asked))
    of = (f"over {limit:g}", "by", "worst", "of")
    return list(
        markdown_lines(("op", "chip", "problems", *of, *(f"asked: {n}" for n in of)), lines)
    )


def _as_is(each: AutoChoice) -> Asked:
    return Asked(each.auto, each.auto_us, each.best, each.best_us)


def _choice_cells(mine: Sequence[AutoChoice], made: Sequence[Asked], limit: float) -> list[str]:
    kinds = [_engine_kind(each.best) for each in made if each.ratio > limit]
    by = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    worst, at = max(zip(made, mine, strict=True), key=lambda pair: pair[0].ratio)
    where = f"{at.model}, M = {at.M}, {at.ranks} ranks: {worst.auto}, {worst.best}"
    if not kinds:
        where = ""
    return [str(len(kinds)), by, f"{worst.ratio:.2f}", where]


def _engine_kind(best: str) -> str:
    if best in ("generic", "triton", "host"):
        return best
    library, _, name = best.partition(", ")
    return name if library == "library" else "tiles" if name else "launch"
