"""FrozenStreaming loads frozen weights block by block; losses and gradients are those of resident weights."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.nn.forwards import ATTRIBUTES
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.timeline import TO_DEVICE, busy
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.techniques.frozen_streaming.technique import FrozenStreaming
from lightning_solo.techniques.quantized_base.technique import QuantizedBase
from lightning_solo.units import GiB
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Held, loader, regression
from tests.training import equal

Make = Callable[..., Any]
WIDTH, BLOCKS = 32, 5


class Adapted(nn.Module):
    """A frozen linear layer with trained factors beside it, none of them zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A residual block with a frozen norm; returns its input and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.first, self.second = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.drop(torch.tanh(self.first(self.norm(x)))))


class Net(nn.Module):
    """Blocks between a frozen and a trained layer; the order of calls is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.order = list(range(BLOCKS))
        self.own_checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in self.order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if self.own_checkpoints else block(x)
        return self.head(x)


BASES = 4 * (2 * 2 * WIDTH**2)
"""Bytes of a block's frozen matrices in fp32."""
BLOCK = BASES + 4 * 2 * WIDTH + 3 * 4 * WIDTH
"""With the biases of 64 and 32 numbers, and both vectors of the norm."""


def module_of(net: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return regression(L, Net() if net is None else net)


class Watch(L.Callback):
    """Notes losses and gradients, the state dict within the fit, and what runs afterwards."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.devices: set[str] = set()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        named = pl_module.named_parameters()
        self.gradients.append({name: p.grad.detach().cpu().clone() for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.devices |= {p.device.type for p in pl_module.net.blocks.parameters() if not p.requires_grad}
        self.state = {name: value.detach().cpu() for name, value in pl_module.state_dict().items()}
        self.states = copy.deepcopy(self.state)


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, batches: int = 3, **options: Any) -> tuple[Any, Watch]:
    """Train, and return the module and the notes."""
    module, watch = module_of() if module is None else module, Watch()
    torch.manual_seed(1)
    make_trainer(L, callbacks=[*callbacks, watch], **options).fit(
        module, loader(batches, width=WIDTH), loader(2, width=WIDTH, seed=2)
    )
    return module, watch


def assert_same(one: tuple[Any, Watch], other: tuple[Any, Watch]) -> None:
    assert one[1].losses == other[1].losses
    assert equal(one[1].gradients, other[1].gradients)
    assert all(bool(g.abs().max() > 0) for g in one[1].gradients[0].values())
    assert equal(one[1].states, other[1].states)
    assert equal(one[1].state, one[1].states)  # it doesn't change with what is loaded later
    assert equal(one[0].cpu(), other[0].cpu())


TECHNIQUES: dict[str, Callable[[], list[Any]]] = {
    "alone": list,
    "recomputed": lambda: [ActivationCheckpointing()],
    "some recomputed": lambda: [ActivationCheckpointing(every_k=2)],
    "products kept": lambda: [ActivationCheckpointing(keep="products")],
    "budget": lambda: [ActivationCheckpointing(budget=0.5)],
    "int8": lambda: [QuantizedBase("int8"), ActivationCheckpointing()],
    "int8 alone": lambda: [QuantizedBase("int8")],
    "offloaded": lambda: [ActivationOffloading(mode="all", min_offload_bytes=1, allow_cpu=True)],
}
QUICK = {("alone", "32-true"), ("recomputed", "bf16-mixed"), ("int8", "bf16-mixed"), ("offloaded", "32-true")}


@pytest.mark.any_device
@pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves")
@pytest.mark.filterwarnings("ignore:activation checkpointing. budget")
@pytest.mark.parametrize(
    ("others", "precision"),
    [
        ((lambda *case: case) if case in QUICK else long)(*case)
        for case in itertools.product(TECHNIQUES, ("32-true", "bf16-mixed"))
    ],
)
def test_losses_and_gradients_are_those_of_resident_weights(make_trainer: Make, others: str, precision: str) -> None:
    options = {"precision": precision, "max_epochs": 2, "num_sanity_val_steps": 1}
    resident = fit(make_trainer, *TECHNIQUES[others](), **options)
    technique = FrozenStreaming()
    streamed = fit(make_trainer, technique, *TECHNIQUES[others](), **options)
    assert technique.ring is not None
    assert technique.ring.copies > 6 * 2 * (BLOCKS - 2)  # of 6 batches, and validation
    assert_same(streamed, resident)


@pytest.mark.any_device
@pytest.mark.every_change
@pytest.mark.parametrize("window", [2, long(3)])
def test_bytes_and_copies(make_trainer: Make, window: int) -> None:
    technique = FrozenStreaming(window=window)
    _, watch = fit(make_trainer, technique, ActivationCheckpointing(), limit_val_batches=0)
    ring = technique.ring
    assert ring is not None
    assert ring.host_bytes == BLOCKS * BLOCK
    # the first forward copies each block, each backward and later forward all but those in the buffers
    assert ring.copies == BLOCKS + (2 * 3 - 1) * (BLOCKS - window)
    assert ring.device_bytes == 0  # after the fit
    assert watch.devices == {"cpu"}
    assert technique.streamed == ()


def test_int8_codes_are_streamed_and_not_the_numbers(make_trainer: Make) -> None:
    technique = FrozenStreaming()
    fit(make_trainer, QuantizedBase("int8"), technique)
    assert technique.ring is not None
    # a code per number, a scale per row; the biases and the norm stay in fp32
    assert technique.ring.host_bytes == BLOCKS * (BASES // 4 + 4 * 3 * WIDTH + BLOCK - BASES)


@pytest.mark.long
def test_nf4_under_mixed_precision(make_trainer: Make) -> None:
    pytest.importorskip("bitsandbytes")
    others = [QuantizedBase("nf4"), ActivationCheckpointing()]
    resident = fit(make_trainer, *others, precision="bf16-mixed", num_sanity_val_steps=1)
    assert_same(fit(make_trainer, *others, FrozenStreaming(), precision="bf16-mixed", num_sanity_val_steps=1), resident)


@pytest.mark.any_device
@pytest.mark.parametrize("own_checkpoints", [False, long(True)])
def test_blocks_called_several_times_in_any_order(make_trainer: Make, own_checkpoints: bool) -> None:
    def module() -> Any:
        made = module_of()
        made.net.order, made.net.own_checkpoints = [3, 0, 4, 4, 1, 2, 0], own_checkpoints
        return made

    resident = fit(make_trainer, module=module())
    assert_same(fit(make_trainer, FrozenStreaming(), module=module()), resident)


@pytest.mark.any_device
def test_a_shared_weight_stays_on_the_device_and_a_tied_one_is_loaded_once(make_trainer: Make) -> None:
    def module() -> Any:
        net = Net()
        net.blocks[1].first.base.weight = net.blocks[0].first.base.weight
        net.blocks[2].norm.weight = net.blocks[2].second.base.bias
        net.blocks[3].norm.weight = net.stem.bias
        return module_of(net)

    torch.manual_seed(5)
    resident = fit(make_trainer, module=module())
    technique = FrozenStreaming()
    torch.manual_seed(5)
    streamed = fit(make_trainer, technique, module=module())
    assert_same(streamed, resident)
    assert technique.ring is not None
    assert technique.ring.host_bytes == BLOCKS * BLOCK - 2 * BASES // 2 - 2 * 128
    assert streamed[0].net.blocks[1].first.base.weight is streamed[0].net.blocks[0].first.base.weight


class Inner(Net):
    """Returns something of the inside of its second block, past its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].first.register_forward_hook(lambda part, args, output: setattr(self, "kept", output))

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.head(self.kept[:, :WIDTH])


@pytest.mark.parametrize("others", ["alone", "recomputed"])
def test_a_backward_past_a_blocks_output_is_right_or_an_error(make_trainer: Make, others: str) -> None:
    def run(*callbacks: Any) -> tuple[Any, Watch]:
        torch.manual_seed(0)
        return fit(make_trainer, *TECHNIQUES[others](), *callbacks, module=module_of(Inner()))

    if others == "alone":
        with pytest.raises(RuntimeError, match=mentions("version 1", "expected version 0")):
            run(FrozenStreaming())
    else:
        assert_same(run(FrozenStreaming()), run())


@pytest.mark.any_device
def test_validation_test_and_prediction_without_a_fit_load_all_weights(make_trainer: Make) -> None:
    module, batches = module_of().eval(), loader(2, width=WIDTH)
    technique = FrozenStreaming()
    plain = make_trainer(L).validate(copy.deepcopy(module), batches, verbose=False)
    trainer = make_trainer(L, callbacks=[technique])
    assert trainer.validate(module, batches, verbose=False) == plain
    assert technique.ring is not None
    assert technique.ring.copies == 2 * BLOCKS + 1  # the first of a third batch, ahead
    factors = 4 * 2 * 2 * 3 * WIDTH  # of two adapters: rank 2, inputs and outputs
    assert technique.ring.host_bytes == BLOCKS * (BLOCK + factors)
    assert trainer.test(module, batches, verbose=False)[0]["test/loss"] == plain[0]["validation/loss"]
    expected = make_trainer(L).predict(copy.deepcopy(module), batches)
    assert equal([*trainer.predict(module, batches)], [*expected])


@pytest.mark.long
def test_a_generating_model_of_transformers(make_trainer: Make) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=4, intermediate_size=64,
        num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    ids = torch.arange(8).view(2, 4)

    class Generates(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model.generate(batch, max_new_tokens=6, do_sample=False)

    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    technique = FrozenStreaming()
    (found,) = make_trainer(L, callbacks=[technique]).predict(Generates(), DataLoader([ids], batch_size=None))
    assert torch.equal(found, expected)
    assert technique.ring is not None
    assert technique.ring.copies >= 6 * 4


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.any_device
def test_checkpoints_are_as_without_it_and_a_resumed_run_is_exact(make_trainer: Make, tmp_path: Path) -> None:
    def run(name: str, *callbacks: Any, **options: Any) -> tuple[Any, str]:
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        module, batches = module_of(), loader(3, width=WIDTH)
        trainer = make_trainer(L, callbacks=[*callbacks, saves], max_epochs=2, enable_checkpointing=True)
        if options:
            for p in module.parameters():
                p.data.mul_(0.5)  # all comes from the file
        torch.manual_seed(1)
        for block in module.net.blocks:
            block.drop.p = 0.0  # no random states are saved
        trainer.fit(module, batches, **options)
        return module, str(tmp_path / name / "step=3.ckpt")

    plain, saved = run("plain", QuantizedBase("int8"))
    whole, path = run("streamed", QuantizedBase("int8"), FrozenStreaming())
    files = [torch.load(each, weights_only=True, map_location="cpu") for each in (saved, path)]
    assert equal(files[0]["state_dict"], files[1]["state_dict"])
    assert equal(files[0]["quantized_base"], files[1]["quantized_base"])
    assert abs(Path(path).stat().st_size - Path(saved).stat().st_size) < 4096
    resumed, _ = run("resumed", QuantizedBase("int8"), FrozenStreaming(), ckpt_path=path)
    assert equal(resumed.cpu(), whole.cpu())
    assert equal(resumed.cpu(), plain.cpu())


class Fails(L.Callback):
    """Copies and saves the module within the fit, then fails in backward."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        trainer, pl_module.trainer = pl_module.trainer, None
        self.copy, file = copy.deepcopy(pl_module.net), io.BytesIO()
        torch.save(pl_module.net, file)
        pl_module.trainer = trainer
        file.seek(0)
        self.loaded = torch.load(file, weights_only=False, map_location="cpu")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == 1:
            raise KeyboardInterrupt("as a user's")


@pytest.mark.any_device
def test_copies_run_alone_and_an_exception_undoes_it(make_trainer: Make) -> None:
    module, fails = module_of(), Fails()
    before, parameters = copy.deepcopy(module.state_dict()), dict(module.named_parameters())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(make_trainer, FrozenStreaming(), fails, module=module)
    module.cpu()
    assert dict(module.named_parameters()) == parameters  # the very same
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in frozen)
    assert all(ATTRIBUTES.isdisjoint(vars(part)) for part in module.modules())
    x = torch.ones(2, WIDTH)
    for each in (fails.copy.cpu(), fails.loaded):
        assert torch.equal(each.eval()(x), module.net.eval()(x))
    fit(make_trainer, FrozenStreaming(), module=module.train())  # again


def test_what_it_refuses(make_trainer: Make) -> None:
    with pytest.raises(NothingToDoError, match=r"no frozen weight in 5 Block.*requires_grad_"):
        fit(make_trainer, FrozenStreaming(), module=module_of(Net().requires_grad_(True)))
    module = module_of()
    module.net.blocks[1].compile(backend="eager")
    with pytest.raises(ConflictError, match=r"net\.blocks\.1 is compiled.*~callback\.frozen_streaming"):
        fit(make_trainer, FrozenStreaming(), module=module)

    class Unfreezes(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.net.blocks[2].first.base.weight.requires_grad_(True)

    with pytest.raises(ConflictError, match=r"net\.blocks\.2\.first\.base\.weight was unfrozen"):
        fit(make_trainer, Unfreezes(), FrozenStreaming())
    module = module_of()
    module.net.order = []
    with pytest.warns(UserWarning, match=r"none of net\.blocks\.0.*was called"):
        fit(make_trainer, FrozenStreaming(), module=module, limit_val_batches=0)


@pytest.mark.long
def test_a_plan_has_the_buffers_the_host_and_the_copies() -> None:
    (batch,) = loader(1, width=WIDTH)
    presets = [{"precision": "32-true", "callback": callback} for callback in ({}, {"frozen_streaming": {}})]
    planner = Planner(module_of, batch, {}, device("rtx-4090"), GiB)
    resident, streamed = (planner.plan("tried", compose(preset)) for preset in presets)
    assert resident.breakdown["weights"] - streamed.breakdown["weights"] == (BLOCKS - 2) * BLOCK
    assert (streamed.host_bytes, resident.host_bytes) == (BLOCKS * BLOCK, 0)
    assert not resident.timeline
    assert busy(streamed.timeline, TO_DEVICE) > 0
    assert streamed.seconds_per_step > resident.seconds_per_step


@pytest.mark.long
def test_a_planned_fit_on_the_cpu_counts_all_in_one_memory(make_trainer: Make) -> None:
    (batch,) = loader(1, width=WIDTH)
    preset = {"precision": "bf16-mixed", "callback": {"frozen_streaming": {}, "activation_checkpointing": {}}}
    plan = Planner(module_of, batch, {}, device("cpu"), GiB).plan("tried", compose(preset))
    held = Held()
    techniques = [FrozenStreaming(), ActivationCheckpointing(verify_recomputation=False)]
    make_trainer(L, callbacks=[*techniques, held], precision="bf16-mixed").fit(
        module_of(), DataLoader([batch] * 4, batch_size=None)
    )
    assert plan.peak_bytes == held.peak_bytes


def language_model(kind: str) -> Any:
    """Return a LightningModule of a small model of transformers with four blocks, in bf16."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4}
    rest = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=4, n_positions=32)
    elif kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        config = transformers.Qwen3MoeConfig(**small, **rest, **experts, output_router_logits=True)
    else:
        config = transformers.LlamaConfig(**small, **rest)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.net.blocks = nn.Module()  # what `Watch` looks at

        def step(self, batch: Tensor) -> Tensor:
            return self.net(input_ids=batch, labels=batch).loss

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.step(batch)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.step(batch)

        def on_train_start(self) -> None:
            for name, p in self.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(p, std=0.02)  # zeros at the start

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    return Module()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.parametrize("kind", ["llama", "moe", "gpt2"])
def test_preset_gives_what_qlora_gives(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")

    def run(preset: str) -> tuple[Any, Watch, Any]:
        module, watch = language_model(kind), Watch()
        kwargs = solo.trainer_kwargs(preset, ["callback.adapters.r=4"], callbacks=[watch])
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = L.Trainer(**kwargs, **quiet, max_steps=3, num_sanity_val_steps=1, default_root_dir=str(tmp_path))
        ids = torch.randint(64, (6, 2, 12), generator=torch.Generator().manual_seed(3))
        trainer.fit(module, DataLoader(ids, batch_size=None), DataLoader(ids[:2], batch_size=None))
        return module, watch, [each for each in trainer.callbacks if isinstance(each, FrozenStreaming)]

    resident, streamed = run("qlora"), run("qlora_streamed")
    (technique,) = streamed[2]
    assert technique.ring.copies >= 4 + 5 * 2
    assert len(resident[1].gradients[0]) >= 8 * 4  # of two factors in at least four layers of each block
    assert_same(streamed[:2], resident[:2])
