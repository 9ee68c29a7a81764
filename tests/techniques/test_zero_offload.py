"""ZeRO-Offload on DeepSpeed's real engine, on the CPU: acted, parity, memory, trace."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_solo.errors import CapabilityError, ConflictError
from lightning_solo.presets.compose import compose
from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.zero_offload import technique as zero_offload
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.config import zero_config
from lightning_solo.zero.module import MODULE_HOOKS
from lightning_solo.zero.process import close_process_group
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
ROOT = Path(__file__).parents[2]


def strategy(home: ModuleType, **arguments: Any) -> Any:
    return for_home(ZeroOffloadStrategy, home.__name__)(**{"allow_cpu": True, "host_optimizer": "torch", **arguments})


def module(home: ModuleType, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    """Return a regression on the same weights each time; SGD shows wrong gradient scales that AdamW would hide."""
    torch.manual_seed(0)
    made = regression(home, Stack(blocks=2))
    made.configure_optimizers = lambda: optimizer(made.parameters(), lr=1e-2)
    return made


def look(home: ModuleType, at_end: Callable[[Any, Any], None]) -> Any:
    class Look(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            at_end(trainer, pl_module)

    return Look()


# --- acted ---


def test_the_engine_is_stage_2_with_the_optimizer_on_the_host(home: ModuleType, make_trainer: Any) -> None:
    seen: dict[str, Any] = {}

    def at_end(trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.deepspeed_engine
        seen.update(
            engine=type(engine).__name__,
            stage=engine.zero_optimization_stage(),
            offload=engine.zero_cpu_offload(),
            zero=type(engine.optimizer).__name__,
            inner=type(engine.optimizer.optimizer),
            accumulation=engine.gradient_accumulation_steps(),
            clipping=engine.gradient_clipping(),
            steps=engine.global_steps,
        )

    trained, untrained = module(home), module(home)
    trainer = make_trainer(
        home,
        strategy=strategy(home),
        callbacks=[look(home, at_end)],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    trainer.fit(trained, loader())
    assert seen == {
        "engine": "DeepSpeedEngine",
        "stage": 2,
        "offload": True,
        "zero": "DeepSpeedZeroOptimizer",
        "inner": torch.optim.AdamW,  # the user's, accepted as it is
        "accumulation": 2,
        "clipping": 0.5,
        "steps": 5,  # 10 batches / 2
    }
    assert not equal(trained, untrained)


def test_the_configuration_is_ours_whatever_the_environment_says(
    home: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", "/no/such/file.json")
    made = strategy(home, pin_memory=False)
    assert made.config == zero_config(pin_memory=False)
    assert made.config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert made.config["zero_force_ds_cpu_optimizer"] is False
    assert isinstance(made, home.strategies.DeepSpeedStrategy)
    assert isinstance(made, zero_offload.ZeroOffloadStrategy)
    assert made.settings.config is None
    assert eval(repr(made), {"ZeroOffloadStrategy": type(made)}).config == made.config


def test_without_deepspeed_the_package_and_the_command_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 24 of the fault matrix."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(CapabilityError, match=mentions("deepspeed", "pip install 'deepspeed>=0.19")):
        for_home(ZeroOffloadStrategy)()


def test_without_cuda_it_says_the_remedy(home: ModuleType, make_trainer: Any) -> None:
    trainer = make_trainer(home, strategy=strategy(home, allow_cpu=False))
    with pytest.raises(CapabilityError, match=mentions("CUDA", "'cpu'", "strategy.allow_cpu=true")):
        trainer.fit(module(home), loader())
    assert not torch.distributed.is_initialized()


# --- parity ---


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("accumulation", [1, 4, 5])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_weights_are_those_of_a_plain_run(
    home: ModuleType, make_trainer: Any, optimizer: Any, accumulation: int, clip: float | None
) -> None:
    """fp32 beside fp32, in the loader's order; 10 batches by 4 leave a short window at the end of each epoch."""
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulation, "gradient_clip_val": clip}
    plain, offloaded = module(home, optimizer), module(home, optimizer)
    plain_trainer = make_trainer(home, **arguments)
    plain_trainer.fit(plain, loader())
    trainer = make_trainer(home, strategy=strategy(home), **arguments)
    trainer.fit(offloaded, loader())
    assert trainer.global_step == plain_trainer.global_step == 2 * -(-10 // accumulation)
    if clip is None:
        assert equal(offloaded, plain)
    else:
        # The norm of the gradients is summed in another order.
        for p, q in zip(offloaded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert not equal(offloaded, module(home))


def test_a_schedule_steps_with_the_optimizer(home: ModuleType, make_trainer: Any) -> None:
    rates = []
    for arguments in ({}, {"strategy": strategy(home)}):
        made = module(home)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        made.configure_optimizers = lambda o=optimizer, s=schedule: (
            [o],
            [{"scheduler": s, "interval": "step"}],
        )
        make_trainer(home, max_epochs=2, accumulate_grad_batches=4, **arguments).fit(made, loader())
        rates.append(schedule.get_last_lr())
    assert rates[0] == rates[1] == [1 / 7]  # 2 epochs of ceil(10 / 4) = 3 steps


# --- memory ---


def test_states_lie_on_the_host_and_mixed_precision_leaves_two_bytes_per_parameter(
    home: ModuleType, make_trainer: Any
) -> None:
    count = sum(p.numel() for p in module(home).parameters())
    seen: dict[str, Any] = {}

    def at_end(trainer: Any, pl_module: Any) -> None:
        zero = trainer.strategy.deepspeed_engine.optimizer
        masters = zero.single_partition_of_fp32_groups
        states = [v for state in zero.optimizer.state.values() for v in state.values() if v.dim()]
        seen["weights"] = sum(p.numel() * p.element_size() for p in pl_module.parameters())
        seen["master"] = sum(m.numel() * m.element_size() for m in masters)
        seen["states"] = sum(s.numel() * s.element_size() for s in states)
        seen["devices"] = {t.device.type for t in (*masters, *states)}
        seen["optimizes"] = {id(p) for group in zero.optimizer.param_groups for p in group["params"]} == set(
            map(id, masters)
        )
        seen["exact"] = [m.detach().clone() for m in masters]

    made = module(home)
    trainer = make_trainer(home, strategy=strategy(home), precision="bf16-mixed", callbacks=[look(home, at_end)])
    trainer.fit(made, loader())
    padded = count + count % 2  # DeepSpeed pads a partition to an even number of elements
    assert seen["weights"] == 2 * count  # bf16 weights on the device, no fp32 copy there
    assert seen["master"] == 4 * padded  # fp32 master
    assert seen["states"] == (4 + 4) * padded  # exp_avg and exp_avg_sq
    assert seen["devices"] == {"cpu"}
    assert seen["optimizes"]
    # Afterwards the module is fp32 again, with the master's values and not their bf16 roundings.
    flat = torch.cat([p.detach().flatten() for p in made.parameters()])
    assert flat.dtype == torch.float32
    assert torch.equal(flat.sort().values, seen["exact"][0][:count].sort().values)
    assert not torch.equal(flat, flat.bfloat16().float())


@pytest.mark.gpu
def test_on_a_gpu_masters_and_gradients_are_pinned_on_the_host_and_nothing_stays_allocated(
    home: ModuleType, make_trainer: Any
) -> None:
    seen: dict[str, Any] = {}

    def at_end(trainer: Any, pl_module: Any) -> None:
        zero = trainer.strategy.deepspeed_engine.optimizer
        inner = zero.optimizer
        states = [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
        seen.update(
            devices={t.device.type for t in states},
            masters={(p.device.type, p.is_pinned()) for group in inner.param_groups for p in group["params"]},
            gradients={p.grad.is_pinned() for group in inner.param_groups for p in group["params"]},
            copies={p.is_pinned() for p in zero.param_buffer_of_bit16_for_cpu_offload_groups},
            weights={(p.device.type, p.dtype) for p in pl_module.parameters()},
        )

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    plain, offloaded = module(home), module(home)
    make_trainer(home, accelerator="gpu").fit(plain, loader())
    arguments = {"strategy": strategy(home, allow_cpu=False), "callbacks": [look(home, at_end)]}
    make_trainer(home, accelerator="gpu", **arguments).fit(offloaded, loader())
    assert seen == {
        "devices": {"cpu"},  # AdamW's states, which nobody copies to the device
        "masters": {("cpu", True)},
        "gradients": {True},
        "copies": {True},
        "weights": {("cuda", torch.float32)},
    }
    assert {p.device.type for p in offloaded.parameters()} == {"cpu"}
    for p, q in zip(plain.parameters(), offloaded.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q.cpu(), rtol=1e-3, atol=1e-5)
    assert not torch.distributed.is_initialized()
    del plain, offloaded, arguments
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20


# --- trace ---


def marks(made: Any) -> Any:
    hooks = [(n, len(vars(part)[n])) for part in made.modules() for n in MODULE_HOOKS]
    names = [sorted(vars(part)) for part in (*made.net.modules(), *made.parameters())]
    return hooks, names, "forward" in vars(made), {name: t.dtype for name, t in made.state_dict().items()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_module_environment_and_process_group_are_as_before(
    home: ModuleType, make_trainer: Any, precision: Any
) -> None:
    made, environment = module(home), dict(os.environ)
    hook = made.net.head.register_forward_hook(lambda *_: None)
    before = marks(made)
    trainer = make_trainer(home, strategy=strategy(home), precision=precision)
    for _ in range(2):
        trainer.fit(made, loader())
        trainer.validate(made, loader(), verbose=False)
        trainer.test(made, loader(), verbose=False)
        assert len(trainer.predict(made, loader())) == 10
        assert marks(made) == before
        assert not torch.distributed.is_initialized()
        assert dict(os.environ) == environment
    hook.remove()
    assert not made.net.head._forward_hooks
    copy.deepcopy(made.net)
    assert b"deepspeed" not in pickle.dumps(made.net)


def test_an_exception_leaves_nothing_behind_and_the_next_fit_works(home: ModuleType, make_trainer: Any) -> None:
    made = module(home)
    before = marks(made)
    whole = made.training_step

    def failing(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ArithmeticError("on purpose")
        return whole(batch, batch_idx)

    made.training_step = failing
    with pytest.raises(ArithmeticError, match="on purpose"):
        make_trainer(home, strategy=strategy(home), precision="bf16-mixed").fit(made, loader())
    del made.training_step
    assert not torch.distributed.is_initialized()
    assert marks(made) == before
    make_trainer(home, strategy=strategy(home)).fit(made, loader())


def test_a_trainer_used_twice_follows_its_accumulation(home: ModuleType, make_trainer: Any) -> None:
    trainer = make_trainer(home, strategy=strategy(home), accumulate_grad_batches=5)
    trainer.fit(module(home), loader())
    trainer.accumulate_grad_batches = 2
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module(home), loader())
    assert trainer.strategy.config["gradient_accumulation_steps"] == 2
    assert trainer.global_step == 2 + 5


# The second Trainer keeps no checkpoints.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resume_equals_the_undisturbed_run(home: ModuleType, make_trainer: Any, tmp_path: Path, precision: Any) -> None:
    undisturbed, first, second = module(home), module(home), module(home)
    make_trainer(home, strategy=strategy(home), precision=precision, max_epochs=2).fit(undisturbed, loader())
    keep = home.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", filename="first")
    trainer = make_trainer(
        home, strategy=strategy(home), precision=precision, enable_checkpointing=True, callbacks=[keep]
    )
    trainer.fit(first, loader())
    resumed = make_trainer(home, strategy=strategy(home), precision=precision, max_epochs=2)
    resumed.fit(second, loader(), ckpt_path=keep.best_model_path)
    assert equal(second, undisturbed)
    assert not equal(second, first)


def test_a_group_of_the_user_is_used_and_kept(home: ModuleType, make_trainer: Any) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            make_trainer(home, strategy=strategy(home)).fit(module(home), loader())
            assert torch.distributed.is_initialized()
    finally:
        close_process_group()


def test_with_an_empty_environment_and_with_a_launchers(tmp_path: Path) -> None:
    """No PATH; then variables that promise a second process which never comes. Nothing is compiled."""
    code = """
import os, warnings
warnings.simplefilter("ignore")
from tests.modules import loader, regression
from tests.training import equal
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
import lightning.pytorch as home
before = dict(os.environ)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)
trainer = home.Trainer(accelerator="cpu", devices=1, strategy=ZeroOffloadStrategy(allow_cpu=True), **quiet)
trainer.fit(regression(home), loader())
after = {k: v for k, v in os.environ.items() if before.get(k) != v}
print("steps", trainer.global_step, "environment", after, "modules", "mpi4py" in __import__("sys").modules)
"""
    launcher = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    for variables in ({}, launcher):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert "steps 10 environment {} modules False" in done.stdout, done.stderr[-2000:]
        assert done.returncode == 0
    assert not (tmp_path / "extensions").exists()


def test_importing_the_file_imports_neither_deepspeed_nor_lightning() -> None:
    code = (
        "import sys, lightning_solo.techniques.zero_offload.technique\n"
        "print({'deepspeed', 'lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_section_that_trains_wrong_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConflictError, match=mentions("zero_optimization.zenflow", "preset compact_host")):
        compose("zero_offload", ["+strategy.config={zero_optimization: {zenflow: {topk_ratio: 0.1}}}"])
