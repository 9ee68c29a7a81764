"""Stage 3, weights that a step doesn't use, and plain checkpoints, on the real engine beside a plain Trainer."""

from __future__ import annotations

import gc
import importlib
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.deepspeed_internals import flat_tensors
from lightning_solo.zero.deepspeed_patches import flat_broadcasts, split_aligned
from lightning_solo.zero.run import EngineRun
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.zero.engines import engine_of, net, step_engine, trained

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
    return for_home(ZeroOffloadStrategy, home.__name__)(allow_cpu=True, host_optimizer="torch", **arguments)


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
    told = pytest.warns(UserWarning, match=mentions("weight decay")) if accumulation == 1 else nullcontext()
    with told:
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
def test_batch_norms_keep_their_statistics_in_fp32(home: ModuleType, make_trainer: Any, stage: int) -> None:
    """With a momentum at which a bf16 mean would stand still: a 500th of it is below a bf16's last bit."""
    batches = 200
    made = regression(home, nn.Sequential(nn.BatchNorm1d(8, momentum=2e-3), nn.Linear(8, 1)))
    dtypes: set[torch.dtype] = set()
    made.on_train_batch_start = lambda *_: dtypes.update(t.dtype for t in (made.net[0].weight, made.net[0].running_var))
    before = nn.functional.batch_norm
    trainer = make_trainer(home, strategy=strategy(home, stage=stage), precision="bf16-mixed")
    trainer.fit(made, data := loader(batches), loader())
    assert nn.functional.batch_norm is before
    assert dtypes == {torch.bfloat16, torch.float32}
    mean, var = torch.zeros(8), torch.ones(8)
    for x, _ in data:
        x = x.bfloat16().float()
        mean, var = mean + 2e-3 * (x.mean(0) - mean), var + 2e-3 * (x.var(0) - var)
    norm = made.net[0]
    assert norm.num_batches_tracked.item() == batches
    torch.testing.assert_close((norm.running_mean, norm.running_var), (mean, var), rtol=1e-4, atol=1e-5)
    assert norm.running_var.dtype == norm.weight.dtype == torch.float32
    assert not torch.equal(norm.weight, torch.ones(8))


class Scaled(Stack):
    """A stack with a learned temperature and a frozen one, both without a dimension, as CLIP's ``logit_scale``."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks=blocks)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature.exp() * self.frozen


@pytest.mark.parametrize("arguments", STAGES)
def test_a_scalar_parameter_is_trained(home: ModuleType, make_trainer: Any, arguments: Any) -> None:
    import deepspeed

    def scaled() -> Any:
        made = module(home, Scaled)

        def clamp(*_: Any) -> None:  # CLIP's, between two steps
            with deepspeed.zero.GatheredParameters(list(made.parameters()), modifier_rank=0), torch.no_grad():
                made.net.temperature.clamp_(max=0.45)

        made.on_train_batch_start = clamp
        return made

    plain, offloaded = scaled(), scaled()
    make_trainer(home).fit(plain, loader())
    make_trainer(home, strategy=strategy(home, **arguments)).fit(offloaded, loader())
    assert offloaded.net.temperature.shape == ()
    assert offloaded.net.temperature < 0.45  # clamped, and stepped
    assert same(offloaded, plain)


def test_deepspeed_shares_its_own_experts_whose_weights_differ_between_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    shared: list[Any] = []
    monkeypatch.setattr(engine, "_broadcast_model", shared.append)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    experts = nn.Linear(2, 2)
    experts.weight.allreduce = False  # as DeepSpeed marks them
    with flat_broadcasts():
        for module in (nn.Linear(2, 2), experts):
            made = SimpleNamespace(module=module)
            engine._broadcast_model(made)
    assert [each.module for each in shared] == [experts]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_modules_own_parameter_is_there_after_it_was_called_within_the_step(
    home: ModuleType, make_trainer: Any, stage: int
) -> None:
    def scaled() -> Any:
        class Scaled(home.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Linear(8, 1)
                self.scale = nn.Parameter(torch.full((1,), 2.0))

            def forward(self, x: Any) -> Any:
                return self.net(x) * self.scale

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return nn.functional.mse_loss(self(batch[0]), batch[1]) + self.scale.square().sum()

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self(batch[0])
                self.log("scale", self.scale.sum())

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        return Scaled()

    plain, offloaded = scaled(), scaled()
    make_trainer(home).fit(plain, loader())
    trainer = make_trainer(home, strategy=strategy(home, stage=stage))
    trainer.fit(offloaded, loader(), loader())
    for p, q in zip(plain.parameters(), offloaded.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    (metrics,) = trainer.validate(offloaded, loader(), verbose=False)
    assert metrics["scale"] == pytest.approx(offloaded.scale.item())
    assert offloaded.scale.item() < 2.0
    assert not offloaded._forward_hooks
    assert not offloaded._forward_pre_hooks


def test_a_step_that_fails_within_the_modules_own_call_leaves_it_usable(home: ModuleType, make_trainer: Any) -> None:
    """One whose user skips the batch: the next step fetches and releases as before."""
    plain, offloaded = module(home), module(home)
    for made in (plain, offloaded):
        step = made.training_step

        def training_step(batch: Any, batch_idx: int, made: Any = made, step: Any = step) -> Any:
            if batch_idx == 3:
                with suppress(RuntimeError):
                    made(batch)  # Lightning's own forward raises NotImplementedError
            return step(batch, batch_idx)

        made.training_step = training_step
    make_trainer(home).fit(plain, loader())
    make_trainer(home, strategy=strategy(home, stage=3)).fit(offloaded, loader())
    for p, q in zip(plain.parameters(), offloaded.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


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
    assert [config.scheduler for config in trainer.strategy.lr_scheduler_configs] == [schedule]  # for a save


@pytest.mark.parametrize("stage", [2, 3])
def test_the_end_of_an_engine_leaves_no_state_and_no_reference_to_the_module(stage: int) -> None:
    made = net()
    stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
    others = list(stack)  # of engines in whose forward a test had something fail
    with engine_of(made, torch.optim.AdamW(trained(made)), stage=stage) as engine:
        step_engine(engine, 0)
        zero, flats = engine.optimizer, [flat for flat, _ in flat_tensors(engine.optimizer)]
        assert zero.optimizer.state
        assert stack[len(others) :] == ([made] if stage == 3 else [])
    assert not zero.optimizer.state
    assert stack == others
    assert [flat.grad for flat in flats] == [None] * len(flats)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_end_of_a_run_gives_the_caches_of_cuda_back(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What is asked of torch, and when; that memory comes back is for a machine with CUDA to show."""
    made, emptied = nn.Linear(2, 1), []
    run = EngineRun(made, torch.bfloat16, torch.device(kind, 0))
    monkeypatch.setattr(gc, "collect", lambda: emptied.append("garbage"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("device"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: emptied.append("host"), raising=False)
    run.end()
    assert emptied == (["garbage", "device", "host"] if kind == "cuda" else ["garbage"])
