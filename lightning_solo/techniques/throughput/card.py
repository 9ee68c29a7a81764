"""The card of `throughput`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Throughput."""

    every_n_steps: int = setting(50, "optimizer steps between two logged values", at_least=1)
    window_size: int = setting(100, "batches over which rates are averaged; shorter runs use all of theirs", at_least=2)
    samples_per_batch: int | None = setting(
        None, "samples of a batch; null: the first dimension of its first tensor", at_least=1
    )
    tokens_per_batch: int | None = setting(
        None, "tokens of a batch; null: counted where the first tensor is (batch, sequence) of integers", at_least=1
    )
    count_flops: bool = setting(True, "count the model's FLOPs in the first batch's forward")
    device_tflops: float | None = setting(
        None,
        "peak TFLOP/s of the device at the precision used; null: from the table of devices",
        check=lambda rate: None if rate is None or rate > 0 else "allowed is a number above 0, such as 82.6, or null",
    )


CARD = Card(
    name="throughput",
    target="lightning_solo.techniques.throughput.technique:Throughput",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it observes",
    costs="a few integers per batch, and with nvidia-ml-py two questions to the GPU's driver per log; the"
    " first batch's forward runs under a FLOP counter (some milliseconds, without torch.compile); never"
    " synchronises; measured by examples/measure_callbacks.py",
    numerics="bit-exact",
    conflicts="none; ``count_flops`` if a forward can't run under a TorchDispatchMode: write ``count_flops: false``",
    reference='model FLOP utilisation: Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311, appendix B',
    exact=True,
    planned="left out",
    engines=EVERYWHERE,
)
