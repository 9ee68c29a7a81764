"""Weights of zero_offload leave as its fp32 master weights: from the module, its plain file and the engine's folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import CheckpointError
from lightning_solo.export.conversion import convert_checkpoint
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

pytest.importorskip("deepspeed", reason="listed on Linux only")

Make = Callable[..., Any]
ZERO = ["strategy.allow_cpu=true", "strategy.host_optimizer=torch"]


class Tied(Stack):
    """A stack with a layer tied to another, a frozen block and buffers."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.second(self.first(x))))


@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
@pytest.mark.parametrize("stage", [2, long(3)])
def test_masters_of_the_module_the_file_and_the_folder(make_trainer: Make, tmp_path: Path, stage: int) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.manual_seed(0)
    module = regression(lightning.pytorch, Tied())
    initial = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1][::-1]}, {"params": [p for p in trained if p.dim() == 1]}]
    module.configure_optimizers = lambda: torch.optim.AdamW(groups, lr=1e-2)
    file, during = tmp_path / "saved.ckpt", []

    class Save(lightning.pytorch.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(file, weights_only=False)
            during.append(solo.export_weights(pl_module))

    options = [f"strategy.stage={stage}", "strategy.save_engine_directory=true"]
    kwargs = solo.trainer_kwargs("zero_offload", [*ZERO, *options], callbacks=[Save()])
    make_trainer(lightning.pytorch, **kwargs).fit(module, loader())
    folder = Path(f"{file}.deepspeed")
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    for source, ours in {
        None: during[0],
        **{each: solo.export_weights(each) for each in (module, file, folder)},
    }.items():
        assert list(ours) == list(during[0])
        masters = {name: ours[name] for name, p in module.named_parameters() if p.requires_grad}
        assert equal(masters, {name: theirs[name] for name in masters})
        assert not equal(masters, {name: value.bfloat16().float() for name, value in masters.items()})
        assert equal(ours["net.second.weight"], theirs["net.first.weight"])
        assert equal(ours["net.norm.running_var"], theirs["net.norm.running_var"])
        frozen = {name: p.bfloat16().float() if source is folder else p for name, p in initial.items()}
        assert equal({name: ours[name] for name in frozen}, frozen)
    bf16 = solo.export_weights(folder, "bf16", tmp_path / "weights.safetensors")
    assert equal(bf16["net.first.weight"], theirs["net.first.weight"].bfloat16())

    with pytest.raises(CheckpointError, match=mentions("DeepSpeed's engine", f"lightning-solo export {folder}")):
        convert_checkpoint(folder, "plain")
    for name in ("*_model_states.pt", "*_optim_states.pt"):
        (first,) = (folder / "checkpoint").glob(name)
        shutil.copy(first, first.with_name(first.name.replace("rank_0", "rank_1", 1)))
    with pytest.raises(CheckpointError, match=mentions("2 processes", f"python {folder}/zero_to_fp32.py")):
        solo.export_weights(folder)
