"""QuantizedBase quantizes frozen weights alone, trains as on the rounded weights, and gives plain weights back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError
from lightning_solo.nn import quantized as quantized_file
from lightning_solo.nn.quantizable import chosen_weights
from lightning_solo.nn.quantized import QuantizedLinear, quantize, quantized, quantized_weights_of
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.timeline import TO_DEVICE, busy
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.quantized_base.technique import RECORD, QuantizedBase
from lightning_solo.units import GiB
from tests.modules import Held, Stack, loader, regression

Make = Callable[..., Any]
WIDTH = 32


def module_of(home: Any = L, net: nn.Module | None = None) -> Any:
    """Return a module with frozen blocks, of which norms and head are trained."""
    torch.manual_seed(0)
    net = Stack(2, width=WIDTH) if net is None else net
    for name, p in net.named_parameters():
        p.requires_grad_("norm" in name or "head" in name)
    return regression(home, net)


class Watch(L.Callback):
    """Notes the layers' classes and the bytes of frozen tensors during a fit."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.kinds = {name: type(part).__name__ for name, part in pl_module.named_modules()}
        self.parameters = [name for name, _ in pl_module.named_parameters()]
        self.gradients = [name for name, p in pl_module.named_parameters() if p.grad is not None]


class SavesOnce(L.Callback):
    """Saves within the fit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def trained(module: Any) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters() if p.requires_grad]


def rounded(weight: Tensor, form: str, device: torch.device) -> Tensor:
    """Return a weight as a device rounds it: the CPU and a GPU divide with other last bits."""
    return quantized(weight.detach(), form, device).dequantized().cpu()


# bitsandbytes' own kernels don't run on the simulated device
@pytest.mark.parametrize("format", ["nf4", pytest.param("int8", marks=pytest.mark.any_device)])
def test_frozen_layers_alone_are_quantized_and_training_is_that_of_the_rounded_weights(
    make_trainer: Make, device: torch.device, format: str
) -> None:
    module, watch = module_of(), Watch()
    plain = copy.deepcopy(module)
    for block in plain.net.blocks:
        for layer in (block.up, block.down):
            layer.weight.data = rounded(layer.weight, format, device)
    technique = QuantizedBase(format)
    before, batches = copy.deepcopy(module.state_dict()), loader(4, width=WIDTH)
    validated = {"num_sanity_val_steps": 1, "val_check_interval": 2, "max_epochs": 1}
    make_trainer(L, callbacks=[technique, watch], **validated).fit(module, batches, batches)
    make_trainer(L, **validated).fit(plain, batches, batches)
    assert watch.kinds["net.blocks.0.up"] == watch.kinds["net.blocks.1.down"] == "QuantizedLinear"
    assert watch.kinds["net.head"] == "Linear"
    assert "net.blocks.0.up.weight" not in watch.parameters
    for one, other in zip(trained(module), trained(plain), strict=True):
        assert torch.equal(one, other)
    for name, weight in plain.state_dict().items():  # the rounded weights, under their names
        assert torch.equal(module.state_dict()[name], weight)
    assert not torch.equal(before["net.head.weight"], module.net.head.weight)
    assert not torch.equal(before["net.blocks.0.up.weight"], module.net.blocks[0].up.weight)
    assert type(module.net.blocks[0].up) is nn.Linear
    assert technique.weights == {}


def test_full_fine_tuning_is_refused(make_trainer: Make) -> None:
    module = regression(L, Stack(2, width=WIDTH))
    with pytest.raises(NothingToDoError, match=r"full fine-tuning .*requires_grad_"):
        make_trainer(L, callbacks=[QuantizedBase()]).fit(module, loader(1, width=WIDTH))
    module = module_of()
    module.net.blocks[1].up.weight.requires_grad_(True)
    with pytest.raises(ConflictError, match=r"net\.blocks\.1\.up\.weight, which is trained"):
        make_trainer(L, callbacks=[QuantizedBase(layers="*.up")]).fit(module, loader(1, width=WIDTH))
    assert type(module.net.blocks[0].up) is nn.Linear


def test_each_pattern_must_match() -> None:
    module = module_of()
    choice = chosen_weights(module, ["*.0.up", "net.blocks.1.down.weight"])
    assert list(choice.modules) == ["net.blocks.0.up", "net.blocks.1.down"]
    assert choice.left_out["net.blocks.0.down.weight"] == "no pattern matches it"
    with pytest.raises(NothingToDoError, match=r"'\*\.gate' matches no weight .*net\.blocks\.0\.up"):
        chosen_weights(module, ["*.up", "*.gate"])
    with pytest.raises(NothingToDoError, match="has no frozen embedding"):
        chosen_weights(module, embeddings="int8")


class Tied(nn.Module):
    """A language model's ends, tied; two layers that share a weight; and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(40, 16), nn.Embedding(8, 16)
        self.one, self.two, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 40, bias=False)
        self.attention = nn.MultiheadAttention(16, 2)
        self.head.weight, self.two.weight = self.embedding.weight, self.one.weight
        self.requires_grad_(False)


def test_heads_embeddings_and_attention_are_left_out_and_ties_stay() -> None:
    module = Tied()
    choice = chosen_weights(module)
    assert list(choice.modules) == ["one", "two"]
    attention = {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert set(choice.left_out) == {"positions.weight", "embedding.weight", "head.weight"} | attention
    assert choice.left_out["head.weight"] == "output head"
    assert choice.left_out["positions.weight"] == "an embedding"
    assert choice.left_bytes == 4 * (module.positions.weight.numel() + 40 * 16 + 48 * 16 + 16 * 16)
    choice = chosen_weights(module, embeddings="int8")
    assert list(choice.modules) == ["positions", "one", "two"]
    remedy = "write callback.quantized_base.embeddings=int8 and callback.quantized_base.head=int8"
    assert remedy in choice.left_out["embedding.weight"]
    choice = chosen_weights(module, embeddings="host", head="host")
    assert set(choice.modules) == {"embedding", "positions", "one", "two", "head"}
    assert choice.tables == {
        id(part.weight): ("head" if part is module.head else "embeddings", "host")
        for part in (module.positions, module.head)
    }
    with pytest.raises(NothingToDoError, match=f"head=int8: .*{remedy}.*head=unchanged"):
        chosen_weights(module, head="int8")
    module.embedding.__class__ = type("Scaled", (nn.Embedding,), {"forward": lambda self, x: 2 * super().forward(x)})
    module.two.__class__ = type("Own", (nn.Linear,), {"forward": lambda self, x: x})
    choice = chosen_weights(module, embeddings="int8", head="int8", required=False)
    assert list(choice.modules) == ["positions"]  # neither the embedding's head nor the other's tied layer
    with pytest.raises(NothingToDoError, match=r"head.weight .*head=unchanged|embeddings=unchanged"):
        chosen_weights(module, head="int8", embeddings="int8")
    module.head.weight.requires_grad_(True)
    with pytest.raises(NothingToDoError, match=r"head=host: .*no frozen output head.*head.weight \(trained\)"):
        chosen_weights(module, embeddings="host", head="host")


class Words(nn.Module):
    """A language model of frozen embedding, layers and head, with norms that are trained."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.blocks = Stack(2, width=WIDTH).blocks
        self.head = nn.Linear(WIDTH, 40, bias=not tied)
        self.requires_grad_(False)
        if tied:
            self.head.weight = self.embedding.weight
        for block in self.blocks:
            block.norm.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))


def words(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return regression(L, Words(tied), loss=nn.functional.cross_entropy)


def sentences(batches: int = 3) -> DataLoader[Any]:
    tokens = torch.randint(40, (batches, 24), generator=torch.Generator().manual_seed(2))
    return DataLoader([(row, row.roll(-1)) for row in tokens], batch_size=None)


class Tables(L.Callback):
    """Notes the formats of the tables, and the codes of all weights."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        weights, self.device = quantized_weights_of(pl_module.net), pl_module.device
        self.formats = [weights[f"{name}.weight"].format for name in ("embedding", "head")]
        self.codes = [weight.codes for weight in weights.values()]


@pytest.mark.any_device
@pytest.mark.parametrize("chunks", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("embeddings", "head", "tied"),
    [("host", "int8", False), ("int8", "host", False), ("int8", "int8", True), ("host", "host", True)],
)
def test_embeddings_and_heads_in_8_bits_and_on_the_host_train_as_rounded_ones(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, device: torch.device,
    embeddings: str, head: str, tied: bool, chunks: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(quantized_file, "_ROWS", 16)  # so that a head has three parts
    module, plain, tables = words(tied), words(tied), Tables()
    before = copy.deepcopy(module.net)
    for part, form in [(plain.net.embedding, embeddings), (plain.net.head, head)][tied:]:
        part.weight.data = rounded(part.weight, form, device)
    for block in plain.net.blocks:
        for layer in (block.up, block.down):
            layer.weight.data = rounded(layer.weight, "int8", device)
    technique = QuantizedBase("int8", embeddings=embeddings, head=head)
    chunked = [solo.ChunkedCrossEntropy(chunk_tokens=10)] if chunks else []  # listed first, it acts later
    fits = {"max_epochs": 2, "num_sanity_val_steps": 1}
    make_trainer(L, callbacks=[*chunked, technique, tables], **fits).fit(module, sentences(), sentences(1))
    make_trainer(L, **fits).fit(plain, sentences(), sentences(1))
    assert tables.formats == [embeddings, head]
    for one, other, first in zip(trained(module), trained(plain), trained(before), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert not torch.allclose(one, first, atol=1e-3)
    assert torch.equal(module.net.embedding.weight, plain.net.embedding.weight)
    assert torch.equal(module.net.head.weight, plain.net.head.weight)
    assert (module.net.head.weight is module.net.embedding.weight) is tied
    assert type(module.net.head) is nn.Linear
    for codes in tables.codes:
        assert codes.device == (torch.device("cpu") if codes.is_floating_point() else tables.device)


def test_layers_after_the_last_block_are_left_out_as_heads() -> None:
    choice = chosen_weights(Stack(2, width=WIDTH).requires_grad_(False))
    assert choice.left_out == {"head.weight": "output head"}
    assert len(choice.modules) == 4


def test_tied_layers_stay_tied(make_trainer: Make) -> None:
    net = Stack(2, width=WIDTH)
    net.blocks[1].up.weight = net.blocks[0].up.weight
    module, technique, seen = module_of(net=net), QuantizedBase(), {}

    class Seen(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update(technique.weights)

    make_trainer(L, callbacks=[technique, Seen()], max_epochs=1).fit(module, loader(2, width=WIDTH))
    assert seen["net.blocks.0.up.weight"] is seen["net.blocks.1.up.weight"]
    assert net.blocks[1].up.weight is net.blocks[0].up.weight
    assert net.blocks[0].up.weight.abs().max() > 0


def hugging_face(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=2, n_positions=32)
    elif kind == "llama":
        config = transformers.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=2)
    else:
        config = transformers.Qwen3MoeConfig(
            **small, intermediate_size=64, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2,
            num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()  # without dropout


@pytest.mark.parametrize("kind", ["gpt2", "llama", pytest.param("moe", marks=pytest.mark.long)])
def test_models_of_transformers(kind: str) -> None:
    model = hugging_face(kind)
    choice = chosen_weights(model)
    routers = {"moe": {f"model.layers.{index}.mlp.gate.weight" for index in range(2)}}
    tables = {"transformer.wte.weight", "transformer.wpe.weight"} if kind == "gpt2" else {"model.embed_tokens.weight"}
    assert set(choice.left_out) == {"lm_head.weight", *tables, *routers.get(kind, ())}
    assert choice.left_bytes == sum(
        model.get_parameter(name).nbytes for name in choice.left_out if name != "transformer.wte.weight"
    )
    if kind == "moe":  # its experts are parameters of three dimensions
        assert {p.ndim for p in choice.parameters().values()} == {2, 3}
    ids = torch.arange(20).view(2, 10) % 64
    undo = [
        quantize(part, {name: quantized(part.get_parameter(name)) for name in names})
        for part, names in choice.modules.values()
    ]
    hidden = model.get_input_embeddings()(ids).requires_grad_()
    mine = model(inputs_embeds=hidden).logits
    (gradient,) = torch.autograd.grad(mine.square().sum(), hidden)
    for each in undo:
        each()
    plain = model(inputs_embeds=hidden).logits
    assert torch.allclose(mine, plain, atol=1e-5)
    assert torch.allclose(gradient, torch.autograd.grad(plain.square().sum(), hidden)[0], atol=1e-4)


class Shared(nn.Module):
    """Has one layer under two names, and experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def test_checkpoints_have_plain_weights_under_each_name(make_trainer: Make, tmp_path: Path) -> None:
    module = module_of(net=Shared())
    module.experts = nn.Parameter(torch.randn(2, 4, 4), requires_grad=False)  # of the LightningModule itself
    module.bias = nn.Parameter(torch.zeros(1))
    keys = list(module.state_dict())
    trainer = make_trainer(L, callbacks=[technique := QuantizedBase("int8"), SavesOnce(tmp_path / "saved.ckpt")])
    trainer.fit(module, loader(2, width=WIDTH))
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    assert sorted(saved) == sorted(keys)
    assert not technique.weights


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_is_exact_and_the_checkpoint_is_a_plain_one(make_trainer: Make, tmp_path: Path) -> None:
    batches = loader(3, width=WIDTH)

    def fit(epochs: int, path: str | None = None, **settings: Any) -> tuple[Any, Any]:
        module, saves = module_of(), ModelCheckpoint(tmp_path / str(epochs), enable_version_counter=False)
        trainer = make_trainer(
            L, callbacks=[QuantizedBase(**settings), saves], max_epochs=epochs, enable_checkpointing=True
        )
        if path:
            for p in module.parameters():
                p.data.mul_(0.5)  # all comes from the file
        trainer.fit(module, batches, ckpt_path=path)
        return module, saves.best_model_path

    whole, _ = fit(2)
    half, path = fit(1)
    resumed, _ = fit(2, path)
    for one, other in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    checkpoint = torch.load(path, weights_only=True)
    plain = module_of()
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(plain.net.blocks[0].up.weight, half.net.blocks[0].up.weight)
    assert make_trainer(L).test(plain, batches, ckpt_path=path)  # without the technique
    with pytest.raises(CheckpointError, match=r"write callback\.quantized_base\.format=nf4"):
        fit(2, path, format="int8")


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.long
def test_a_run_with_tables_in_8_bits_and_on_the_host_is_resumed_exactly(make_trainer: Make, tmp_path: Path) -> None:
    def fit(epochs: int, path: str | None = None, tied: bool = False, **settings: Any) -> tuple[Any, str]:
        module, saves = words(tied), ModelCheckpoint(tmp_path / f"{epochs}{tied}", enable_version_counter=False)
        settings = {"embeddings": "host", "head": "int8", **settings}
        callbacks = [QuantizedBase("int8", **settings), solo.ChunkedCrossEntropy(), saves]
        trainer = make_trainer(L, callbacks=callbacks, max_epochs=epochs, enable_checkpointing=True)
        if path:
            for p in module.parameters():
                p.data.mul_(0.5)  # all comes from the file
        trainer.fit(module, sentences(), ckpt_path=path)
        return module, saves.best_model_path

    for tied, settings in ((False, {}), (True, {"embeddings": "int8"}), (True, {"head": "host"})):
        (whole, _), (_, path) = fit(2, tied=tied, **settings), fit(1, tied=tied, **settings)
        resumed, _ = fit(2, path, tied, **settings)
        for one, other in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
            assert torch.equal(one, other)
    _, path = fit(1)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["state_dict"].keys() == words().state_dict().keys()
    assert set(checkpoint[RECORD]) >= {"net.head.weight"}
    assert "net.embedding.weight" not in checkpoint[RECORD]
    with pytest.raises(CheckpointError, match=r"head=host asks .*write callback\.quantized_base\.head=int8"):
        fit(2, path, head="host")


@pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves")
def test_gradients_under_checkpointing_and_offloading_are_the_same(make_trainer: Make) -> None:
    runs: list[int] = []

    def fit(*callbacks: Any) -> list[Tensor]:
        module = module_of()
        runs.clear()
        module.net.blocks[1].norm.register_forward_pre_hook(lambda *_: runs.append(1))
        trainer = make_trainer(L, callbacks=[QuantizedBase(), *callbacks], max_epochs=1)
        trainer.fit(module, loader(3, width=WIDTH))
        return trained(module)

    alone = fit()
    assert len(runs) == 3
    recomputed = fit(solo.ActivationCheckpointing())
    assert len(runs) == 2 * 3  # not once for each quantized layer
    offloaded = fit(solo.ActivationOffloading("all", min_offload_bytes=1, allow_cpu=True))
    for one, other, third in zip(alone, recomputed, offloaded, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.long  # the import of peft takes seconds
def test_adapters_of_peft_train_on_rounded_weights_and_save_no_quantized_module(make_trainer: Make) -> None:
    functional = pytest.importorskip("peft.functional")
    from peft import LoraConfig

    def adapted(**options: Any) -> Any:
        module = module_of()
        config = LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False, **options)
        torch.manual_seed(3)
        functional.inject_adapter_in_model(config, module)
        return module

    for options in ({}, {"use_dora": True}, {"modules_to_save": ["head"]}):
        module, watch, technique = adapted(**options), Watch(), QuantizedBase()
        plain = copy.deepcopy(module)
        for part, _ in chosen_weights(plain).modules.values():
            part.weight.data = quantized(part.weight).dequantized()
        make_trainer(L, callbacks=[technique, watch], max_epochs=1).fit(module, loader(3, width=WIDTH))
        make_trainer(L, max_epochs=1).fit(plain, loader(3, width=WIDTH))
        assert watch.kinds["net.blocks.0.up.base_layer"] == "QuantizedLinear"
        for one, other in zip(trained(module), trained(plain), strict=True):
            assert torch.equal(one, other)
    module = module_of()
    module.net.blocks[0].up.requires_grad_(False)
    quantize(module.net.blocks[0].up, {"weight": quantized(module.net.blocks[0].up.weight)})
    config = LoraConfig(target_modules=["down"], modules_to_save=["up"])
    functional.inject_adapter_in_model(config, module)
    with pytest.raises(ConflictError, match="modules_to_save"):
        make_trainer(L, callbacks=[QuantizedBase()], max_epochs=1).fit(module, loader(3, width=WIDTH))


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_planned_bytes_are_those_of_a_fit_and_no_gradient_or_state_is_of_frozen_weights(
    make_trainer: Make, format: str
) -> None:
    def module() -> Any:
        return module_of(net=Stack(2, width=256))

    (batch,) = loader(1, width=256)
    preset = {"precision": "bf16-mixed", "callback": {"quantized_base": {"format": format}}}
    plan = Planner(module, batch, {}, device("cpu"), GiB).plan("tried", compose(preset))
    held = Held()
    batches: Any = DataLoader([batch] * 6, batch_size=None)
    make_trainer(L, callbacks=[QuantizedBase(format), held], precision="bf16-mixed", max_epochs=1).fit(
        module(), batches
    )
    assert plan.peak_bytes == held.peak_bytes
    frozen, trained = 4 * 4 * 256 * 256, 2 * 2 * 256 + 256 + 1  # numbers of linear layers; of norms and the head
    assert plan.breakdown["weights"] < {"nf4": 0.53, "int8": 1.05}[format] * frozen + 4 * trained + 4 * 2 * 5 * 256
    assert plan.breakdown["gradients"] <= 4 * trained
    assert plan.peak_bytes < 2 * frozen  # bf16 weights alone would take as much


@pytest.mark.long
def test_planned_bytes_of_tables_on_the_host() -> None:
    def plan(**settings: str) -> Any:
        preset = {"callback": {"quantized_base": {"format": "int8", **settings}, "chunked_cross_entropy": {}}}
        planner = Planner(words, next(iter(sentences())), {}, device("rtx-4090"), GiB)
        return planner.plan("tried", compose({"precision": "32-true", **preset}))

    resident, tables, size = plan(), plan(embeddings="host", head="int8"), 40 * WIDTH
    assert (resident.host_bytes, tables.host_bytes) == (0, 4 * size)
    scales = 4 * 40
    assert resident.breakdown["weights"] - tables.breakdown["weights"] == 4 * size + 3 * size - scales
    hosted = plan(embeddings="host", head="host")
    assert hosted.host_bytes == 2 * 4 * size
    assert busy(hosted.timeline, TO_DEVICE) > 0


def test_a_module_that_is_quantized_before_stays_so(make_trainer: Make) -> None:
    module = module_of()
    for block in module.net.blocks:
        for layer in (block.up, block.down):
            quantize(layer, {"weight": quantized(layer.weight)})
    make_trainer(L, callbacks=[QuantizedBase()], max_epochs=1).fit(module, loader(2, width=WIDTH))
    assert isinstance(module.net.blocks[0].up, QuantizedLinear)
