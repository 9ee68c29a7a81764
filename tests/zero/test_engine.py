"""Stage 3, weights that a step doesn't use, and plain checkpoints, on the real engine beside a plain Trainer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.strategies.zero_offload import zero_offload_class
from lightning_solo.zero.disk import split_aligned
from tests.modules import Stack, loader, regression

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]
STAGES = [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload_parameters": True}]


class Sometimes(Stack):
    """A stack whose first block is used in every other call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.blocks[1:](x) if self.calls % 2 else self.blocks(x))


def strategy(home: ModuleType, **arguments: Any) -> Any:
    return zero_offload_class(home.__name__)(allow_cpu=True, host_optimizer="torch", **arguments)


def module(home: ModuleType, net: type[nn.Module] = Stack) -> Any:
    torch.manual_seed(0)
    made = regression(home, net(blocks=2))
    made.configure_optimizers = lambda: torch.optim.AdamW(made.parameters(), lr=1e-2)
    return made


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("arguments", STAGES)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_stage_gives_the_plain_runs_weights(
    home: ModuleType, make_trainer: Any, arguments: Any, accumulation: int
) -> None:
    plain, offloaded = module(home), module(home)
    make_trainer(home, accumulate_grad_batches=accumulation).fit(plain, loader())
    trainer = make_trainer(home, strategy=strategy(home, **arguments), accumulate_grad_batches=accumulation)
    trainer.fit(offloaded, loader())
    assert same(offloaded, plain)
    assert not same(offloaded, module(home))


@pytest.mark.parametrize("arguments", STAGES[:2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_weights_that_a_step_does_not_use_get_a_gradient_of_zero(
    home: ModuleType, make_trainer: Any, arguments: Any, accumulation: int
) -> None:
    plain, offloaded = module(home, Sometimes), module(home, Sometimes)

    def zeros(*_: Any) -> None:
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)

    plain.optimizer_zero_grad = zeros
    make_trainer(home, accumulate_grad_batches=accumulation).fit(plain, loader())
    trainer = make_trainer(home, strategy=strategy(home, **arguments), accumulate_grad_batches=accumulation)
    trainer.fit(offloaded, loader())
    assert same(offloaded, plain)


@pytest.mark.parametrize("arguments", STAGES)
@pytest.mark.parametrize("saves_plain", [False, True])
def test_a_plain_run_and_ours_resume_one_another(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any, saves_plain: bool
) -> None:
    undisturbed, first, second = module(home), module(home), module(home)
    make_trainer(home, max_epochs=2).fit(undisturbed, loader())
    keep = home.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", filename="first")
    saving = {} if saves_plain else {"strategy": strategy(home, **arguments)}
    make_trainer(home, enable_checkpointing=True, callbacks=[keep], **saving).fit(first, loader())
    saved = torch.load(keep.best_model_path, weights_only=True)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    loading = {"strategy": strategy(home, **arguments)} if saves_plain else {}
    make_trainer(home, max_epochs=2, **loading).fit(second, loader(), ckpt_path=keep.best_model_path)
    assert same(second, undisturbed)
    assert not same(second, first)


def test_fragments_are_split_at_aligned_offsets() -> None:
    for offset, numel in ((0, 1), (7, 30), (8, 16), (9, 3), (255, 1000)):
        parts = split_aligned(offset, numel, 8)
        assert [i for start, length in parts for i in range(start, start + length)] == list(
            range(offset, offset + numel)
        )
        assert sum(start % 8 == 0 and length % 8 == 0 for start, length in parts) == (len(parts) > 1 or offset == 8)


@pytest.mark.parametrize("fails", [False, True])
def test_linear_saves_the_parameter_while_stage_3_runs(home: ModuleType, make_trainer: Any, fails: bool) -> None:
    """A saved view of a weight would keep what was fetched until its backward pass; afterwards torch's is back."""
    before, made, seen = nn.functional.linear, module(home), []
    step = made.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        node = loss.grad_fn
        names = []
        while node is not None:
            names.append(type(node).__name__)
            node = node.next_functions[0][0] if node.next_functions else None
        seen.append((nn.functional.linear is not before, any("LinearFunctionForZeroStage3" in n for n in names)))
        if fails:
            raise ArithmeticError("on purpose")
        return loss

    made.training_step = training_step
    trainer = make_trainer(home, strategy=strategy(home, stage=3), limit_train_batches=1)
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        trainer.fit(made, loader())
    assert seen == [(True, True)]
    assert nn.functional.linear is before


@pytest.mark.parametrize("stage", [2, 3])
def test_batch_norm_trains_in_bf16_and_its_statistics_are_fp32_again(
    home: ModuleType, make_trainer: Any, stage: int
) -> None:
    torch.manual_seed(0)
    made = regression(home, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    trainer = make_trainer(home, strategy=strategy(home, stage=stage), precision="bf16-mixed")
    trainer.fit(made, loader(), loader())
    norm = made.net[1]
    assert norm.num_batches_tracked.item() == 10
    assert norm.running_mean.abs().sum().item() > 0
    assert {norm.running_mean.dtype, norm.running_var.dtype, norm.weight.dtype} == {torch.float32}


@pytest.mark.parametrize("arguments", STAGES)
def test_an_optimizer_that_a_module_keeps_is_its_own_again(home: ModuleType, make_trainer: Any, arguments: Any) -> None:
    plain, offloaded = module(home), module(home)
    for made, offloads in ((plain, False), (offloaded, True)):
        kept = torch.optim.SGD(made.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(kept, 1)
        made.configure_optimizers = lambda kept=kept, schedule=schedule: ([kept], [schedule])
        for _ in range(2):
            trainer = make_trainer(home, **({"strategy": strategy(home, **arguments)} if offloads else {}))
            trainer.fit(made, loader())
            assert list(map(id, kept.param_groups[0]["params"])) == list(map(id, made.parameters()))
    assert same(plain, offloaded)
    assert trainer.strategy.lr_scheduler_configs == []
