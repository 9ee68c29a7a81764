"""Weights that don't fit the host, in files: few buffers suffice for training, validation and modules of many."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.disk import parameter_buffers
from lightning_solo.zero.extension import what_is_missing
from tests.modules import loader, regression

pytest.importorskip("deepspeed", reason="listed on Linux only")
MISSING = what_is_missing("async_io")
pytestmark = [
    pytest.mark.long,  # the first test of a machine's life builds async_io
    pytest.mark.skipif(MISSING is not None, reason=f"async_io: {MISSING}"),
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
]
WIDTH = 768  # a square in bf16 is 1.125 MiB: from 1 MiB on DeepSpeed puts a tensor into a file


class Many(nn.Module):
    """Seven square matrices in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def chain() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(7) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def module(home: ModuleType, middle: Any) -> Any:
    torch.manual_seed(0)
    return regression(home, nn.Sequential(nn.Linear(8, WIDTH), middle(), nn.Linear(WIDTH, 1)), lr=1e-3)


@pytest.mark.parametrize("middle", [chain, Many])
def test_weights_in_files_train_and_validate_as_in_memory(
    home: ModuleType, make_trainer: Any, tmp_path: Path, middle: Any
) -> None:
    in_memory, on_disk, seen = module(home, middle), module(home, middle), []

    class Look(home.Callback):  # type: ignore[name-defined,misc]
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            swapped = [p for p in pl_module.parameters() if p.nvme_swapper.swappable_tensor(p)]
            files = [p.nvme_swapper.id_to_path[p.ds_id] for p in swapped]
            seen.append((len(swapped), sum(Path(file).stat().st_size >= 2 * WIDTH**2 for file in files)))

    arguments = {"precision": "bf16-mixed", "max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2}
    offload = {"allow_cpu": True, "stage": 3, "offload_parameters": True, "host_optimizer": "torch"}
    strategy = for_home(ZeroOffloadStrategy, home.__name__)
    memory = make_trainer(home, strategy=strategy(**offload), **arguments)
    memory.fit(in_memory, loader(), loader())
    config = {"zero_optimization": {"offload_param": {"max_in_cpu": 0}}}
    disk = make_trainer(
        home,
        strategy=strategy(**offload, nvme_path=str(tmp_path / "swap"), config=config),
        callbacks=[Look()],
        **arguments,
    )
    disk.fit(on_disk, loader(), loader())
    assert seen == [(7, 7)] * 2
    assert disk.callback_metrics == memory.callback_metrics
    for p, q in zip(on_disk.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(p, q)
    disk.validate(on_disk, loader(), verbose=False)
    assert not (tmp_path / "swap").exists()


def test_buffers_are_as_many_and_as_large_as_the_module_needs() -> None:
    small = nn.Linear(4, 4)
    assert parameter_buffers(nn.Sequential(small, chain()), 2) == {"buffer_size": WIDTH**2, "buffer_count": 5}
    assert parameter_buffers(nn.Sequential(small, Many()), 2) == {"buffer_size": WIDTH**2, "buffer_count": 14}
    assert parameter_buffers(small, 2) == {"buffer_size": 2**20, "buffer_count": 5}


def test_a_change_in_place_leaves_the_gradients_of_others_as_they_are(
    home: ModuleType, make_trainer: Any, tmp_path: Path
) -> None:
    """Gradients of biases wait in memory while a master on disk is changed, between backward and step."""

    class Clamp(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            import deepspeed

            bias = pl_module.net[1].bias
            gathered = deepspeed.zero.GatheredParameters([bias], modifier_rank=0)
            with torch.no_grad(), gathered if hasattr(bias, "ds_id") else nullcontext():
                bias.clamp_(-0.01, 0.01)

    trained = []
    for strategy in (None, {"stage": 3, "nvme_path": str(tmp_path / "swap")}):
        torch.manual_seed(0)
        made = regression(home, nn.Sequential(nn.Linear(8, 521), nn.Linear(521, 523), nn.Linear(523, 1)))
        kind = for_home(ZeroOffloadStrategy, home.__name__)
        arguments = {"strategy": kind(allow_cpu=True, host_optimizer="torch", **strategy)} if strategy else {}
        make_trainer(home, callbacks=[Clamp()], **arguments).fit(made, loader())
        trained.append(made)
    assert trained[0].net[1].bias.abs().max().item() == torch.tensor(0.01).item()
    for p, q in zip(*(made.parameters() for made in trained), strict=True):
        assert torch.equal(p, q)
