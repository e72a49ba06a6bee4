"""`weft bench memory`: a rank's peak grows with its part of the sequence, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.bench import memory

HEADS, HEAD_DIM = 1, 64


def growth_body(engine: str) -> None:
    """Twice the tokens: the growth in MiB, against that of one tensor of the rank's own."""
    tokens, W = 6144, dist.get_world_size()
    memory.attention_peak(2 * tokens, HEADS, HEAD_DIM, engine=engine)  # workspaces of this size
    short, long = (
        memory.attention_peak(n, HEADS, HEAD_DIM, engine=engine) for n in (tokens, 2 * tokens)
    )
    tensors = (long - short) / (4 * HEADS * HEAD_DIM * tokens / W)
    if engine == "host":
        # q, k, v, out, and torch's own before it is merged; k and v in symmetric memory.
        assert 4 < tensors < 9, tensors
    else:  # also all keys and values, and masks
        assert tensors > 50, tensors


@pytest.mark.parametrize("engine", ["host", "generic"])
def test_a_rank_needs_memory_for_its_own_part_alone(ranks: Any, engine: str) -> None:
    ranks(2, growth_body, engine)


def test_what_is_freed_on_the_way_is_not_in_the_peak() -> None:
    memory.peak_bytes(lambda: None)  # from here on large blocks lie in one heap

    def call() -> None:
        first, kept = torch.empty(1 << 20).zero_(), torch.empty(1 << 20).zero_()
        del first
        torch.cat([kept, kept])

    assert 11 << 20 <= memory.peak_bytes(call) < 14 << 20  # pages of other things come and go


def test_free_memory_between_blocks_does_not_hide_a_peak() -> None:
    memory.peak_bytes(lambda: None)  # from here on large blocks lie in one heap
    blocks = [torch.empty(1 << 20).zero_() for _ in range(9)]
    del blocks[2:8]
    held = memory.peak_bytes(lambda: torch.empty(1 << 22).zero_().sum())
    assert 15 << 20 <= held < 20 << 20  # pages of other things come and go


def test_rows_and_their_file(tmp_path: Any, capsys: Any) -> None:
    given = ["--ranks", "2", "--tokens", "512", "1024", "--heads", "1", "--head-dim", "16"]
    assert memory.main([*given, "--gathered-up-to", "512", "--out", str(tmp_path)]) == 0
    assert "weft bench memory" in capsys.readouterr().out
    head, short, long = (tmp_path / "memory.csv").read_text().splitlines()
    assert head == "ranks,tokens,shard,forward,step,gathered"
    assert short.startswith("2,512,0.0625,") and not short.endswith(",")
    assert long.startswith("2,1024,0.125,") and long.endswith(",")
