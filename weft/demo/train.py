"""The training run, the same code for one process and for W ranks."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft import collectives, settings
from weft.collectives.ranks.group import process_group
from weft.demo.data import Corpus, standard_library
from weft.demo.model import Llama, LlamaShape, parallelize
from weft.dtensor import DeviceMesh, DTensor, Replicate

_HELD_OUT_BATCHES = 4
_PROMPT = "    def "
_TEMPERATURE = 0.6


@dataclass(frozen=True)
class Run:
    """What is trained, and how. The same for the reference and for the ranks."""

    shape: LlamaShape
    steps: int
    batch: int
    lr: float
    seed: int
    device: str = "cpu"
    engine: settings.Engine = "auto"
    text_bytes: int = 320

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.seq_len

    def learning_rate(self, step: int) -> float:
        """Up to `lr` over the first tenth of the steps, then down to a tenth of it by a cosine."""
        warm_up = max(1, self.steps // 10)
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass
class TrainingLog:
    """What one process saw. Losses are the same on every rank."""

    losses: list[float] = field(default_factory=list)
    held_out: float = math.nan
    step_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    decisions: Counter[settings.Decision] = field(default_factory=Counter)
    text: str = ""


def train(rank: int, progress: Callable[[Any], None], run: Run) -> TrainingLog:
    """Train on this process, with all ranks of the process group where there is one.

    `progress` is given (steps done, loss) after every step.
    """
    os.environ["WEFT_ENGINE"] = run.engine
    trainer = _Trainer(run)
    result = TrainingLog()
    for step in range(run.steps):
        started, waited = time.perf_counter(), collectives.wait_seconds()
        if step == 0 and trainer.sharded:
            with settings.explaining() as decisions:
                loss = trainer.step(step)
            result.decisions.update(decisions)
        else:
            loss = trainer.step(step)
        result.losses.append(loss)
        result.step_seconds.append(time.perf_counter() - started)
        result.wait_seconds.append(collectives.wait_seconds() - waited)
        progress((step + 1, loss))
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of step {step} is {loss}: lower --lr (it is {run.lr:g})")
    result.held_out = trainer.held_out_loss()
    if trainer.sharded:
        # Each byte is a sign of life: an interpreted kernel takes its time.
        result.text = trainer.generate(lambda: progress((run.steps, result.losses[-1])))
    return result


class _Trainer:
    """A model, its optimizer and its text, on this process's device."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.sharded = dist.is_initialized()
        self.device = torch.device(run.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.corpus: Corpus = standard_library()
        torch.manual_seed(run.seed)
        self.model = Llama(run.shape)  # on the CPU: the same numbers for every device
        self.model.to(self.device)
        if self.sharded:
            # On the group that there is: another one may be NCCL's, which takes no shared GPUs.
            self.mesh = DeviceMesh.from_group(process_group(None), self.device.type)
            parallelize(self.model, self.mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1
        )

    def step(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.learning_rate(step)
        inputs, targets = self._batch(step)
        loss = self._loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._whole(loss.detach()).item()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        losses = [
            self._whole(self._loss(*self._batch(i, held_out=True))).item()
            for i in range(_HELD_OUT_BATCHES)
        ]
        return sum(losses) / len(losses)

    @torch.no_grad()
    def generate(self, alive: Callable[[], None]) -> str:
        """A few lines of text, byte by byte, `alive` called at each. Every rank draws the same."""
        generator = torch.Generator().manual_seed(self.run.seed)
        seq_len = self.run.shape.seq_len
        text = list(_PROMPT.encode())
        for _ in range(self.run.text_bytes):
            seen = text[-seq_len:]
            # Attention is causal: what stands behind the last byte does not reach it, and a
            # sequence of one length keeps every shard as long as in training.
            tokens = torch.tensor([seen + [0] * (seq_len - len(seen))], device=self.device)
            logits = self._whole(self.model(self._replicated(tokens)))[0, len(seen) - 1]
            chances = torch.softmax(logits.double().cpu() / _TEMPERATURE, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
            alive()
        shown = bytes(text).decode(errors="replace").replace("\t", "    ")
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in shown)

    def _batch(self, step: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        run = self.run
        inputs, targets = self.corpus.batch(
            step, run.batch, run.shape.seq_len, seed=run.seed, held_out=held_out
        )
        return self._replicated(inputs.to(self.device)), self._replicated(targets.to(self.device))

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs)  # (B, S, V), on ranks sharded by V
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _replicated(self, tensor: Tensor) -> Tensor:
        if not self.sharded:
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
