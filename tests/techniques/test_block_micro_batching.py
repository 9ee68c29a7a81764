"""BlockMicroBatching runs a block's batch in parts: the gradients of the whole, bytes of a part, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_solo.errors import ConflictError
from lightning_solo.memory.ledger import Ledger, saved_for_backward
from lightning_solo.nn.blocks import named_blocks
from lightning_solo.nn.forwards import ATTRIBUTES, restore_forwards
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.techniques.block_micro_batching.splitting import Returned, Splitting, split_blocks
from lightning_solo.techniques.block_micro_batching.technique import BlockMicroBatching
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.frozen_streaming.technique import FrozenStreaming
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.weights_on_host.technique import WeightsOnHost
from lightning_solo.units import GiB
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Block, Held, Stack, loader, regression
from tests.remedies import OVERRIDE
from tests.training import equal

WIDTH, HEADS, LENGTH, TERMS = 8, 2, 6, 192
OPTION = "callback.block_micro_batching"
CALLS: list[int] = []
"""Samples of each call of a `Residual`."""


class Residual(nn.Module):
    """A block, to which subclasses give more arguments or results."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Attending(Residual):
    """Attends by keyword: a mask (batch or 1, 1, length, length) or (length, length), and a rotary tuple of batch 1."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        cos, sin = rotary or (1.0, 0.0)
        turned = x * cos + x.roll(1, -1) * sin
        heads = turned.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return super().forward(F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2) + x)


class Crossing(Residual):
    """Of a decoder: takes the encoder's states and the mask of each sample in a dict."""

    def forward(self, x: Tensor, states: dict[str, Any]) -> Tensor:
        keys = states["encoder"]
        mask = states["masks"][0][:, None] if states["masks"] else None
        return super().forward(x + F.scaled_dot_product_attention(x, keys, keys, mask))


@dataclass
class Routed:
    """What a block with a router returns."""

    hidden: Tensor
    logits: Tensor
    layer: int


class Expert(Residual):
    """Returns the logits of all its tokens beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Routed:
        logits = self.router(x.flatten(0, 1))
        return Routed(super().forward(x) * logits.softmax(-1)[:, :1].view(*x.shape[:2], 1), logits, 7)


class Biased(Residual):
    """The first one makes a bias of batch 1 from a parameter, which all others take and return, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.positions * 2 if bias is None else bias
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return super().forward(
            F.scaled_dot_product_attention(heads, heads, heads, bias).transpose(1, 2).flatten(2)
        ), bias


class Recurrent(Residual):
    """Takes and returns the states (layers, batch, width) of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, batch_first=True)

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, states = self.lstm(x, states)
        return super().forward(out), states


class Rows(Residual):
    """Takes and returns (length, batch, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(0))


def run(kind: str, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Call blocks of a kind with the arguments that it takes; return a loss that depends on all their outputs."""
    batch, length = x.shape[:2]
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=x.dtype)  # noqa: E731
    a, b, c = blocks
    if kind in ("masked", "square"):
        masks = {"masked": draw(batch, 1, length, length), "square": draw(length, length)}
        rotary = draw(1, length, WIDTH).cos(), draw(1, length, WIDTH).sin()
        return a(x, mask=masks[kind], rotary=rotary).square().mean() + c(b(x, mask=masks[kind])).mean()
    if kind == "crossing":
        encoded = draw(batch, 5, WIDTH) * x.mean()  # it needs a gradient
        states = {"encoder": encoded, "masks": [draw(batch, 5)], "name": "encoder"}
        return c(b(a(x, states), states), {**states, "masks": []}).square().mean()
    if kind == "experts":
        one, two = a(x), b(x)
        assert one.layer == 7
        return (c(one.hidden).hidden * two.hidden).mean() + torch.cat([one.logits, two.logits]).logsumexp(-1).mean()
    if kind == "biased":
        y, bias = a(x)
        return sum(c(b(y, bias)[0], bias)[0].square().mean(0).flatten())  # type: ignore[return-value]
    if kind == "recurrent":
        states = (draw(3, batch, WIDTH) * x.mean(), draw(3, batch, WIDTH))
        y, states = a(x, states)
        y, states = b(y, states)
        return y.square().mean() + states[1].mean()
    if kind == "unet":
        down = a(x)
        return c(b(down.tanh()) + down).square().mean() + a(down).mean()  # one is called twice
    return c(b(a(x))).square().mean()


BLOCKS: dict[str, type[Residual]] = {
    "plain": Residual,
    "unet": Residual,
    "masked": Attending,
    "square": Attending,
    "crossing": Crossing,
    "experts": Expert,
    "biased": Biased,
    "recurrent": Recurrent,
    "rows": Rows,
}


def gradients(kind: str, blocks: nn.ModuleList, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    loss = run(kind, blocks, x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in blocks.parameters())]


def divided(blocks: Any, micro_batches: int = 4, batch_dim: int = 0) -> dict[str, Splitting]:
    return split_blocks({f"blocks.{n}": block for n, block in enumerate(blocks)}, micro_batches, batch_dim)


# --- it acted, with parity ---


def test_parts_run_one_after_the_other_and_again_in_reverse() -> None:
    CALLS.clear()
    block = Residual()
    divided([block], 3)
    x = torch.randn(7, WIDTH, requires_grad=True)
    output = block(x)
    # the check (as many as in the first part, the last of these alone), then 7 samples in 3 parts
    assert CALLS == [3, 1, 3, 2, 2]
    output.sum().backward()
    assert CALLS[5:] == [2, 2, 3]
    with torch.no_grad():
        block(x)
    assert CALLS[8:] == [7]
    block(x[:1]).sum().backward()
    assert CALLS[9:] == [1, 1]


@pytest.mark.parametrize(
    ("kind", "samples", "micro_batches"),
    [
        *[(kind, 8, 4) for kind in BLOCKS],
        ("plain", 7, 4),
        ("square", LENGTH, 2),  # a mask (length, length), and as many samples
        *map(long, ["unet", "biased", "recurrent", "experts", "square"], [5, 4, 3, 2, LENGTH], [2, 4, 2, 4, LENGTH]),
        long("biased", HEADS, 2),  # a bias (1, heads, ...)
        long("masked", 1, 4),  # runs whole
    ],
)
def test_gradients_are_those_of_the_whole_batch(kind: str, samples: int, micro_batches: int) -> None:
    torch.manual_seed(2)
    whole = nn.ModuleList(BLOCKS[kind]() for _ in range(3)).double()
    dim = int(kind == "rows")
    x = torch.randn(*[(samples, LENGTH), (LENGTH, samples)][dim], WIDTH, dtype=torch.float64)
    parts = copy.deepcopy(whole)
    splittings = divided(parts, micro_batches, dim)
    for batch in (x, x[:4]):  # the second is of another size, if the first has more samples
        for got, expected in zip(gradients(kind, parts, batch), gradients(kind, whole, batch), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert max(splitting.most for splitting in splittings.values()) == min(samples, micro_batches)


def test_what_has_another_size_than_the_batch_stays_whole_when_sizes_agree() -> None:
    torch.manual_seed(2)
    whole = nn.ModuleList(Attending() for _ in range(3)).double()
    parts = copy.deepcopy(whole)
    divided(parts, LENGTH)
    for samples in (2 * LENGTH, LENGTH):  # then each part has one row of the mask, which any number of queries can take
        x = torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64)
        for got, expected in zip(gradients("square", parts, x), gradients("square", whole, x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, long(True)])
def test_gradients_of_16_bit_weights_are_summed_in_fp32(autocast: bool) -> None:
    def error(micro_batches: int) -> float:
        torch.manual_seed(2)
        block, x = Residual(), torch.randn(TERMS, WIDTH)
        exact = copy.deepcopy(block).double()
        (exact(x.double()) * torch.linspace(-1, 2, WIDTH)).sum().backward()
        kind = torch.float32 if autocast else torch.bfloat16
        block.to(kind)
        divided([block], micro_batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = block(x.to(kind))
        (output.float() * torch.linspace(-1, 2, WIDTH)).sum().backward()
        return float((block.up.weight.grad.double() - exact.up.weight.grad).norm() / exact.up.weight.grad.norm())

    assert error(TERMS) < 1.5 * error(1)  # a sum in bf16 loses what is under 1/256 of it


def test_dropout_is_repeated_in_backward() -> None:
    torch.manual_seed(2)
    block = Residual(dropout=0.5)
    divided([block])
    x = torch.randn(8, 3, WIDTH, requires_grad=True)
    output = block(x)
    state = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    # the derivative by `down` shows the mask of each row and unit: it is that of the output
    masks = (output != x).double()
    assert 0.3 < masks.mean() < 0.7
    inner = torch.tanh(block.up(block.norm(x))).double()
    expected = 2 * torch.einsum("btw,bti->wi", masks, inner)
    torch.testing.assert_close(block.down.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


# --- memory ---


@pytest.mark.any_device
def test_the_input_is_kept_and_the_peak_is_a_parts() -> None:
    samples = 64

    def counted(micro_batches: int) -> tuple[int, int]:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block(WIDTH) for _ in range(3)])
        divided(list(net)[1:], micro_batches)
        x = torch.randn(samples, 32, WIDTH)
        net(x).sum().backward()  # with the check
        kept = saved_for_backward(lambda: net(x))[1]
        net.zero_grad()
        with Ledger(net, ()) as ledger:
            net(x).sum().backward()
        return kept, ledger.peak_bytes

    (kept, peak), (kept_whole, peak_whole) = counted(8), counted(1)
    hidden = samples * 32 * WIDTH * 4
    assert kept == kept_whole == 4 * hidden  # the input of the first layer and of each block
    inside = 2 * 4 * hidden  # of `up` and relu
    assert peak_whole > inside + 3 * hidden
    assert peak < peak_whole - inside * 7 // 8 + 2 * hidden  # gradients of the input, in parts and joined


# --- fits ---


def fitted(make_trainer: Any, *callbacks: Any, dropout: float = 0.0, net: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    net = net or Stack(4, 8, dropout)
    module = regression(L, net.to(torch.bfloat16) if options.get("precision") == "bf16-true" else net)
    torch.manual_seed(1)
    trainer = make_trainer(L, callbacks=list(callbacks), max_steps=4, **options)
    trainer.fit(module, loader(), loader(1) if "num_sanity_val_steps" in options else None)
    return module.cpu().state_dict()


OTHERS: dict[str, Callable[[], list[Any]]] = {
    "alone": list,
    "offloaded": lambda: [ActivationOffloading(min_offload_bytes=16, allow_cpu=True)],
    "all offloaded": lambda: [ActivationOffloading(mode="all", min_offload_bytes=16, allow_cpu=True)],
    "released": lambda: [GradientRelease()],
    "on the host": lambda: [WeightsOnHost(window=2)],
}


@pytest.mark.any_device
@pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves")
@pytest.mark.parametrize("others", ["alone", "offloaded", *map(long, ("all offloaded", "released", "on the host"))])
def test_a_fit_ends_with_the_weights_of_a_plain_one(others: str, make_trainer: Any) -> None:
    technique = BlockMicroBatching(micro_batches=3)  # of 4 samples: two
    plain = fitted(make_trainer)
    module = fitted(make_trainer, technique, *OTHERS[others](), num_sanity_val_steps=1)
    torch.testing.assert_close(module, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["fp32", *map(long, ("mixed", "compact", "all on the host", "clipped"))])
def test_streamed_weights_pass_the_bus_twice_and_give_the_same_bits(kind: str, make_trainer: Any) -> None:
    has_states = kind in ("compact", "all on the host")
    states: list[Any] = [CompactStates(state_budget=0 if "host" in kind else None)] if has_states else []
    options: dict[str, Any] = {"dropout": 0.1, "precision": "bf16-true" if states else "32-true"}
    if kind == "mixed":
        options["precision"] = "bf16-mixed"
    if kind == "clipped":
        options["gradient_clip_val"] = 0.5
    counts = {}
    for parts in (1, 4):
        results = []
        for other in (GradientRelease(), technique := WeightsOnHost(window=2)):
            others = [copy.copy(state) for state in states]
            results.append(fitted(make_trainer, BlockMicroBatching(micro_batches=parts), other, *others, **options))
        assert equal(*results)
        ring = technique.ring
        assert ring is not None
        counts[parts] = ring.copies, ring.stores, ring.stored_bytes
    assert counts[1] == counts[4]
    if kind != "clipped":  # four steps: in forward all, in backward all but the last two
        assert counts[4][:2] == (4 * (4 + 4 - 2), 4 * 4)


@pytest.mark.any_device
@pytest.mark.long
def test_frozen_streamed_weights_pass_twice_too(make_trainer: Any) -> None:
    counts, results = [], []
    for parts in (1, 4):
        torch.manual_seed(3)
        net = Stack(4, 8)
        for name, p in net.blocks.named_parameters():
            p.requires_grad_("norm" in name)
        technique = FrozenStreaming()
        results.append(fitted(make_trainer, BlockMicroBatching(micro_batches=parts), technique, net=net))
        counts.append(technique.ring.copies)
    assert counts[0] == counts[1] > 0
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_fit_leaves_no_trace_and_a_failing_one_neither(make_trainer: Any) -> None:
    class Fails(L.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            self.copy = copy.deepcopy(pl_module.net)
            raise KeyboardInterrupt

    for callbacks in ([], [fails := Fails()]):
        technique, net = BlockMicroBatching(), Stack(2)
        before = {*net.state_dict()}
        try:
            fitted(make_trainer, technique, *callbacks, net=net)
        except (KeyboardInterrupt, SystemExit):
            assert callbacks
        assert all(ATTRIBUTES.isdisjoint(vars(each)) for each in net.modules())
        assert technique.divided == ()
        assert {*net.state_dict()} == before
        assert all(type(p) is nn.Parameter for p in net.parameters())
    fails.copy(torch.randn(4, 8)).sum().backward()
    restore_forwards(fails.copy.modules(), Splitting)
    assert all(ATTRIBUTES.isdisjoint(vars(each)) for each in fails.copy.modules())


@pytest.mark.long
@pytest.mark.cpu_only("it plans for it")
def test_a_plan_counts_one_micro_batch_in_a_block(make_trainer: Any) -> None:
    def module() -> Any:
        torch.manual_seed(0)
        return regression(L, Stack(4, 16))

    (batch,) = loader(1, batch_size=64, width=16)
    planner, peaks = Planner(module, batch, {}, device("cpu"), GiB), []
    for number in (1, 4):
        callback = {"block_micro_batching": {"micro_batches": number}}
        plan = planner.plan("tried", compose({"precision": "32-true", "callback": callback}))
        held = Held()
        make_trainer(L, callbacks=[BlockMicroBatching(micro_batches=number), held]).fit(
            module(), DataLoader([batch] * 4, batch_size=None)
        )
        assert plan.peak_bytes == held.peak_bytes
        peaks.append(plan.peak_bytes)
    hidden = 64 * 16 * 4
    assert peaks[1] < peaks[0] - 2 * 4 * hidden * 3 // 4 + 2 * hidden  # of `up` and relu


@pytest.mark.long
@pytest.mark.parametrize("samples", [4, 5])  # of 5 tokens
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bloom", "mixtral"])
def test_models_of_transformers(kind: str, samples: int) -> None:
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {
        "vocab_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    configs = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=8),
        "t5": lambda: transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, num_heads=4, d_ff=32, dropout_rate=0.0),
        "bloom": lambda: transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=4),
        "mixtral": lambda: transformers.MixtralConfig(
            **small, hidden_size=16, intermediate_size=32, num_local_experts=4, output_router_logits=True
        ),
    }
    config = configs[kind]()
    config.decoder_start_token_id = 0
    automatic = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    whole = automatic.from_config(config).train()
    for part in whole.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    parts = copy.deepcopy(whole)
    splittings = split_blocks(named_blocks(parts), 4)
    ids, mask = torch.randint(32, (samples, 5)), torch.ones(samples, 5, dtype=torch.long)
    mask[1, -2:] = 0  # its batch dimension, with that of the tokens alike in one case
    for model in (parts, whole):
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert {splitting.most for splitting in splittings.values()} == {-(-samples // -(-samples // 4))}
    for got, expected in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-6)


# --- what is refused, and what is said ---


class Other(Residual):
    """A block with a way of its own."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.how(super().forward(x), *args, **kwargs)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        (lambda y: y - y.mean(0), "mixes samples"),
        (lambda y: y + y.roll(1, 0), "mixes samples"),
        (lambda y: (y, y.square().mean()), "output '1'"),  # a loss of its own
        (lambda y: (y, y.sum().item()), "returns a float"),
        (lambda y: (y, {"aux": y.square().mean(0)}), "output '1.aux'"),
        (lambda y: (y, (y @ y.T)), "(4, 4) for 4 samples"),
        (lambda y: y[1:], "shape (3, 8) for 4 samples"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, long(torch.bfloat16)])
def test_blocks_that_mix_samples_are_refused(how: Any, word: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = Other(how).to(dtype)
    before = copy.deepcopy(block.state_dict())
    divided([block], 2)
    match = mentions("'blocks.0' (Other)", word, f"{OPTION}.blocks=[ClassName]", f"~{OPTION}")
    with pytest.raises(ConflictError, match=match):
        block(torch.randn(8, WIDTH, dtype=dtype))
    assert equal(block.state_dict(), before)
    assert all(module.training for module in block.modules())


@pytest.mark.parametrize(
    ("how", "arguments", "word"),
    [
        (lambda y, cu_seqlens: y, {"cu_seqlens": torch.tensor([0, 4, 8])}, "packed sequences"),
        (lambda y, z: y, {"z": torch.eye(3).to_sparse()}, "nested or sparse"),
        (lambda y, seen: seen.append(y.mean()) or y, {"seen": []}, "changes a list"),
        (lambda y, table: y + table, {"table": torch.randn(5, WIDTH)}, "fails on 4 of 8 samples"),
    ],
)
def test_arguments_that_cant_be_divided_are_refused(how: Any, arguments: Any, word: str) -> None:
    block = Other(how)
    divided([block], 2)
    with pytest.raises(ConflictError, match=mentions("'blocks.0' (Other)", word, f"~{OPTION}")):
        block(torch.randn(8, WIDTH), **arguments)


def test_another_batch_dimension_is_named_and_works() -> None:
    blocks = nn.ModuleList([Rows()])
    x = torch.randn(6, 4, WIDTH)
    divided(blocks)
    with pytest.raises(ConflictError, match=mentions("mixes samples", f"{OPTION}.batch_dim=1")):
        blocks[0](x)
    restore_forwards(blocks, Splitting)
    divided(blocks, batch_dim=1)
    assert blocks[0](x).shape == x.shape


class Changes(Residual):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("differentiable", [True, False])
def test_changes_of_the_input_are_refused(differentiable: bool) -> None:
    block = Changes()
    divided([block])
    x = torch.randn(8, WIDTH, requires_grad=differentiable)
    with pytest.raises(ConflictError, match=mentions("'blocks.0'", "input in place", OPTION)):
        block(x * 1).sum().backward()


class Keeps(Stack):
    """Takes something out of its blocks past their outputs: for each call, or the last."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(self.keep)

    def keep(self, part: Any, args: Any, output: Tensor) -> None:
        if self.how == "last":
            self.kept = [output]
        else:
            self.kept.append(output if self.how == "rows" else output.square().mean())

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        y = super().forward(x)
        if self.how != "numbers":
            return y + torch.cat(self.kept).square().mean()
        return y + torch.stack(self.kept).sum()


def test_results_past_the_output_are_refused_unless_they_are_rows_of_all(make_trainer: Any) -> None:
    for how in ("last", "numbers"):
        with pytest.raises(ConflictError, match=mentions("net.blocks.", "past its output", f"~{OPTION}")) as caught:
            fitted(make_trainer, BlockMicroBatching(), net=Keeps(how))
        remedy = [match[0] for match in OVERRIDE.finditer(str(caught.value).rpartition(": ")[2])]
        beside = compose({"callback": {"block_micro_batching": {}}}, ["+callback=throughput", *remedy])
        assert [chosen.card.name for chosen in beside.techniques] == ["throughput", "activation_checkpointing"]
    torch.testing.assert_close(
        fitted(make_trainer, BlockMicroBatching(), net=Keeps("rows")),
        fitted(make_trainer, net=Keeps("rows")),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.cpu_only("it runs nothing")
def test_what_it_refuses(make_trainer: Any) -> None:
    for other, word in (("activation_checkpointing", "saved_tensors"), ("regional_compilation", "compiles")):
        with pytest.raises(ConflictError, match=mentions(OPTION, f"callback.{other}", "; write ")) as found:
            compose({"precision": "32-true", "callback": {"block_micro_batching": {}, other: {}}})
        assert word in str(found.value) or "tensors that forward keeps" in str(found.value)
    with pytest.raises(ConflictError, match=mentions("activation")):
        fitted(make_trainer, BlockMicroBatching(), ActivationCheckpointing())
    net = Stack(2)
    net.blocks[1].compile(backend="eager")
    with pytest.raises(ConflictError, match=mentions("net.blocks.1 is compiled", f"~{OPTION}")):
        fitted(make_trainer, BlockMicroBatching(), net=net)
    net = Stack(2)
    net.blocks[0].norm = nn.BatchNorm1d(8)
    with pytest.raises(ConflictError, match=mentions("net.blocks.0.norm", "GroupNorm", f"~{OPTION}")):
        fitted(make_trainer, BlockMicroBatching(), net=net)
    net.gradient_checkpointing = True
    with pytest.raises(ConflictError, match=mentions("gradient_checkpointing_disable()", f"~{OPTION}")):
        fitted(make_trainer, BlockMicroBatching(), net=net)


def test_a_batch_of_one_sample_and_blocks_that_arent_called_are_warned_of(make_trainer: Any) -> None:
    module = regression(L, Stack(2))
    trainer = make_trainer(L, callbacks=[BlockMicroBatching()], max_steps=2)
    with pytest.warns(UserWarning, match=mentions("one sample", f"{OPTION}.micro_batches=1")):
        trainer.fit(module, loader(2, batch_size=1))
    module = regression(L, Stack(2))
    module.net.forward = module.net.head.forward
    with pytest.warns(UserWarning, match=mentions("net.blocks.0", f"{OPTION}.blocks=[ClassName]")):
        make_trainer(L, callbacks=[BlockMicroBatching()], max_steps=1).fit(module, loader(1))


def test_nothing_is_noted_after_the_first_loss(make_trainer: Any) -> None:
    technique = BlockMicroBatching()

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            self.notes = [each.returned for each in technique._splittings.values()]

    looks = Looks()
    fitted(make_trainer, technique, looks)
    assert looks.notes == [None] * 4
    assert isinstance(Returned().calls, list)
