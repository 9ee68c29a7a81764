"""WeightsOnHost brings trained weights block by block and takes them back; the numbers are those of resident ones."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_solo.errors import BudgetError, ConflictError, NothingToDoError
from lightning_solo.memory.weight_ring import WeightRing
from lightning_solo.nn.forwards import ATTRIBUTES
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.timeline import TO_DEVICE, TO_HOST, busy
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.weights_on_host import technique as technique_module
from lightning_solo.techniques.weights_on_host.technique import WeightsOnHost
from lightning_solo.units import GiB
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Held, loader, regression
from tests.training import equal

Make = Callable[..., Any]
keep_last = WeightRing.keep_last
WIDTH, BLOCKS = 32, 5


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.drop(torch.tanh(self.first(self.norm(x)))))


class Net(nn.Module):
    """Blocks between two layers; the order of calls is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.order = list(range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


MATRICES = 4 * 2 * 4 * WIDTH**2
BLOCK = MATRICES + 4 * (4 * WIDTH + 3 * WIDTH)
"""Bytes of a block in fp32: two matrices, two biases, the two vectors of the norm."""
OUTSIDE = 4 * (WIDTH**2 + WIDTH + WIDTH + 1)


def module_of(net: nn.Module | None = None, **attributes: Any) -> Any:
    torch.manual_seed(0)
    return regression(L, Net() if net is None else net, **attributes)


class Watch(L.Callback):
    """Notes losses, weights and where they are after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.states: list[dict[str, Tensor]] = []
        self.devices: set[str] = set()
        self.places: set[tuple[str, str, str]] = set()  # of optimizer states

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.devices |= {p.device.type for p in pl_module.net.blocks.parameters()}
        states = [(name, trainer.optimizers[0].state.get(p, {})) for name, p in pl_module.named_parameters()]
        self.places |= {(name, key, state[key].device.type) for name, state in states for key in state}
        self.states.append({name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()})


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, batches: int = 3, **options: Any) -> tuple[Any, Watch]:
    """Train, and return the module and the notes."""
    module, watch = module_of() if module is None else module, Watch()
    torch.manual_seed(1)
    make_trainer(L, callbacks=[watch, *callbacks], **options).fit(
        module, loader(batches, width=WIDTH), loader(2, width=WIDTH, seed=2)
    )
    return module, watch


def assert_same(one: tuple[Any, Watch], other: tuple[Any, Watch]) -> None:
    assert one[1].losses == other[1].losses
    assert one[1].places == other[1].places
    assert equal(one[1].states, other[1].states)
    assert equal(one[0].cpu(), other[0].cpu())
    assert not equal(one[1].states[0], one[1].states[-1])


def compact(budget: Any, **settings: Any) -> Callable[[], list[Any]]:
    return lambda: [CompactStates(state_budget=budget, **settings), ActivationCheckpointing()]


TECHNIQUES: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "alone": ("32-true", list),
    "mixed": ("bf16-mixed", list),
    "recomputed": ("bf16-mixed", lambda: [ActivationCheckpointing()]),
    "some recomputed": ("32-true", lambda: [ActivationCheckpointing(every_k=2)]),
    "products kept": ("32-true", lambda: [ActivationCheckpointing(keep="products")]),
    "offloaded": ("32-true", lambda: [ActivationOffloading(mode="all", min_offload_bytes=1, allow_cpu=True)]),
    "compact": ("bf16-true", compact(None)),
    "states on the host": ("bf16-true", compact(0)),
    "some on the host": ("bf16-true", compact(30_000)),
    "fp32 states on the host": ("32-true", compact(0, master_bits=32, moment_bits=32)),
    "stochastic": ("bf16-true", compact(0, master_bits="16-stochastic")),
    "compact, mixed": ("bf16-mixed", compact(0)),
}
QUICK = {"alone", "recomputed", "states on the host", "compact"}


@pytest.mark.any_device
@pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves")
@pytest.mark.parametrize("others", [name if name in QUICK else long(name) for name in TECHNIQUES])
def test_losses_and_weights_are_those_of_resident_weights(make_trainer: Make, others: str) -> None:
    precision, techniques = TECHNIQUES[others]
    options = {"precision": precision, "max_epochs": 2, "num_sanity_val_steps": 1}
    resident = fit(make_trainer, *techniques(), GradientRelease(), **options)
    technique = WeightsOnHost()
    on_host = fit(make_trainer, technique, *techniques(), **options)
    assert technique.ring is not None
    assert technique.ring.copies > 6 * 2 * (BLOCKS - 3)  # of 6 batches, and validation
    assert technique.ring.stores == 6 * BLOCKS
    assert_same(on_host, resident)


@pytest.mark.any_device
@pytest.mark.parametrize(("others", "window", "clip"), [(1, 2, None), long(0, 3, 1e-3), long(2, 2, 1e-3)])
def test_beside_gradient_release_and_clipping_by_value(
    make_trainer: Make, others: int, window: int, clip: float | None
) -> None:
    options = {"gradient_clip_val": clip, "gradient_clip_algorithm": clip and "value"}
    resident = fit(make_trainer, **options)
    technique = WeightsOnHost(window=window)
    callbacks: list[Any] = [technique]
    if others:
        callbacks.insert(others - 1, GradientRelease())
    assert_same(fit(make_trainer, *callbacks, **options), resident)
    assert technique.ring is not None
    assert technique.ring.stores == 3 * BLOCKS


@pytest.mark.any_device
@pytest.mark.every_change
@pytest.mark.parametrize("window", [2, long(3)])
def test_bytes_and_copies(make_trainer: Make, window: int) -> None:
    technique = WeightsOnHost(window=window)
    _, watch = fit(make_trainer, technique, ActivationCheckpointing(), limit_val_batches=0)
    ring = technique.ring
    assert ring is not None
    assert ring.host_bytes == BLOCKS * BLOCK
    assert ring.copies == 3 * (BLOCKS + BLOCKS - window)  # backward begins with those in the buffers
    assert (ring.stores, ring.stored_bytes) == (3 * BLOCKS, 3 * BLOCKS * BLOCK)
    assert ring.device_bytes == 0  # after the fit
    assert watch.devices == {"cpu"}
    assert technique.stored == ()


class Resident(L.Callback):
    """Counts the bytes of weights on the device, as the forward of a training step ends."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (technique,) = (each for each in trainer.callbacks if isinstance(each, WeightsOnHost))
        pl_module.net.register_forward_hook(lambda *_: self.count(technique, pl_module))

    def count(self, technique: WeightsOnHost, pl_module: Any) -> None:
        if not pl_module.training:
            return
        self.stored = technique.stored
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in pl_module.parameters()}
        storages |= {buffer.data_ptr(): buffer.nbytes for buffer in technique.ring.buffers}
        self.bytes = sum(storages.values())


@pytest.mark.any_device
def test_a_budget_keeps_the_last_blocks(make_trainer: Make) -> None:
    found = Resident()
    technique = WeightsOnHost(weight_budget=OUTSIDE + 2 * BLOCK + 100, window=2)
    kept = fit(make_trainer, technique, found)
    assert found.stored == tuple(f"net.blocks.{number}" for number in range(BLOCKS - 2))
    assert found.bytes == OUTSIDE + (2 + 2) * BLOCK + 4  # two that stay, two buffers, and one number in place of others
    assert_same(kept, fit(make_trainer))
    with pytest.raises(BudgetError, match=mentions(f"weight_budget={OUTSIDE} ", "100 B more")):
        fit(make_trainer, WeightsOnHost(weight_budget=f"{OUTSIDE - 100}B"))
    with pytest.raises(NothingToDoError, match=mentions("weight_budget", "~callback.weights_on_host")):
        fit(make_trainer, WeightsOnHost(weight_budget="1GiB"))


@pytest.mark.any_device
@pytest.mark.parametrize("others", ["alone", "states on the host"])
def test_auto_keeps_the_last_blocks_that_the_first_step_leaves_room_for(
    make_trainer: Make, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision, techniques = TECHNIQUES[others]
    block = BLOCK if precision == "32-true" else BLOCK // 2
    monkeypatch.setattr(technique_module, "free_bytes", lambda device: 10**9)  # a CPU has no memory of a device
    monkeypatch.setattr(WeightRing, "keep_last", lambda ring, free: keep_last(ring, 5 * block // 2))
    found, technique = Resident(), WeightsOnHost(weight_budget="auto", window=2)
    kept = fit(make_trainer, technique, found, *techniques(), precision=precision, limit_val_batches=0)
    assert found.stored == tuple(f"net.blocks.{number}" for number in range(BLOCKS - 2))
    assert technique.ring is not None
    assert technique.ring.stores == BLOCKS + 2 * (BLOCKS - 2)
    assert equal(kept[1].states, fit(make_trainer, *techniques(), precision=precision, limit_val_batches=0)[1].states)


@pytest.mark.any_device
def test_auto_leaves_room_for_states_and_as_many_blocks_as_buffers(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    monkeypatch.setattr(technique_module, "free_bytes", lambda device: 10**9)
    monkeypatch.setattr(WeightRing, "keep_last", lambda ring, free: rooms.append(free) or keep_last(ring, free))
    technique, found = WeightsOnHost(weight_budget="auto", window=2), Resident()
    module, _ = fit(make_trainer, technique, found)
    states = 2 * sum(p.nbytes for p in module.parameters())
    assert len(rooms) == 1
    assert 10**9 - rooms[0] == pytest.approx(states, abs=4 * len([*module.parameters()]))  # Adam's, and steps
    assert found.stored == ("net.blocks.0", "net.blocks.1")


@pytest.mark.any_device
def test_frozen_weights_come_and_what_is_unfrozen_goes_back(make_trainer: Make) -> None:
    class Unfreezes(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                pl_module.net.blocks[0].first.requires_grad_(True)

    def module() -> Any:
        torch.manual_seed(5)
        net = Net()
        for block in net.blocks:
            block.first.requires_grad_(False)
        net.blocks[2].requires_grad_(False)
        return module_of(net)

    technique = WeightsOnHost()
    assert_same(
        fit(make_trainer, technique, Unfreezes(), module=module()), fit(make_trainer, Unfreezes(), module=module())
    )
    assert technique.ring is not None
    assert technique.ring.host_bytes == BLOCKS * BLOCK
    first = MATRICES // 2 + 4 * 4 * WIDTH
    assert technique.ring.stored_bytes == 3 * (BLOCKS - 1) * (BLOCK - first) + first


class Halves(L.Callback):
    """Changes or replaces weights through ``.data``, which leaves their versions; notes the validation's losses."""

    def __init__(self, replaces: bool) -> None:
        self.replaces = replaces
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for p in pl_module.parameters():
            if self.replaces:
                p.data = p.data * 0.5
            else:
                p.data.mul_(0.5)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # as an average gives place
        self.on_train_batch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["validation/loss"]))


@pytest.mark.any_device
@pytest.mark.parametrize("replaces", [False, True])
def test_changes_through_data_between_steps_count(make_trainer: Make, replaces: bool) -> None:
    halves = [Halves(replaces), Halves(replaces)]
    resident = fit(make_trainer, halves[0], val_check_interval=1)
    assert_same(fit(make_trainer, WeightsOnHost(), halves[1], val_check_interval=1), resident)
    assert len(halves[0].losses) == 3
    assert halves[0].losses == halves[1].losses


class Bounded(Block):
    """Clamps one of its weights in forward, as ``nn.Embedding(max_norm=...)`` does, and reads one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = 0.1
        self.shifts = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.bound *= 0.9
        with torch.no_grad():
            self.first.weight.clamp_(-self.bound, self.bound)
        return super().forward(x + self.shifts)


class Reads(L.Callback):
    """Notes the weights after each batch of validation."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.states.append({name: p.detach().cpu().clone() for name, p in pl_module.net.named_parameters()})


@pytest.mark.any_device
@pytest.mark.parametrize(("recomputed", "frozen"), [(False, False), (True, True)])
def test_what_a_block_changes_in_its_forward_goes_back(make_trainer: Make, recomputed: bool, frozen: bool) -> None:
    def run(*callbacks: Any) -> tuple[Any, Watch]:
        torch.manual_seed(5)
        net = Net()
        net.blocks = nn.ModuleList(Bounded() for _ in range(BLOCKS))
        for block in net.blocks:
            block.first.requires_grad_(not frozen)
        others = [ActivationCheckpointing(verify_recomputation=False)] if recomputed else []
        return fit(make_trainer, *callbacks, *others, module=module_of(net))

    technique, reads = WeightsOnHost(), [Reads(), Reads()]
    assert_same(run(technique, reads[0]), run(reads[1]))
    assert technique.ring is not None
    assert technique.ring.host_bytes == BLOCKS * BLOCK  # without the integers
    assert len(reads[0].states) == 2
    assert equal(reads[0].states, reads[1].states)


@pytest.mark.any_device
@pytest.mark.parametrize("others", ["alone", long("recomputed")])
def test_blocks_called_several_times_in_any_order(make_trainer: Make, others: str) -> None:
    def module() -> Any:
        made = module_of()
        made.net.order = [3, 0, 4, 4, 1, 2, 0]
        return made

    resident = fit(make_trainer, *TECHNIQUES[others][1](), module=module())
    assert_same(fit(make_trainer, WeightsOnHost(window=2), *TECHNIQUES[others][1](), module=module()), resident)


@pytest.mark.any_device
def test_shared_weights_stay_on_the_device_and_a_tied_one_comes_once(make_trainer: Make) -> None:
    def module() -> Any:
        torch.manual_seed(5)
        net = Net()
        net.blocks[1].first.weight = net.blocks[0].first.weight
        net.blocks[2].norm.weight = net.blocks[2].second.bias
        net.blocks[3].norm.weight = net.stem.bias
        return module_of(net)

    technique = WeightsOnHost()
    on_host = fit(make_trainer, technique, module=module())
    assert_same(on_host, fit(make_trainer, module=module()))
    assert technique.ring is not None
    assert technique.ring.host_bytes == BLOCKS * BLOCK - MATRICES - 2 * 128
    assert on_host[0].net.blocks[1].first.weight is on_host[0].net.blocks[0].first.weight


class Turning(Block):
    """Returns a view that it has changed in place, as a convolution over time does."""

    def forward(self, x: Tensor) -> Tensor:
        turned = super().forward(x).t().contiguous().t()
        turned += x
        return turned


class Masked(Net):
    """Multiplies the outputs of its blocks in place, as SASRec does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turning() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return self.head(x)


@pytest.mark.any_device
def test_outputs_that_are_views_may_be_changed_in_place(make_trainer: Make) -> None:
    def module() -> Any:
        torch.manual_seed(5)
        return module_of(Masked())

    technique = WeightsOnHost()
    assert_same(fit(make_trainer, technique, module=module()), fit(make_trainer, module=module()))
    assert technique.ring is not None
    assert technique.ring.stores >= 3 * (BLOCKS - 3)


class Inner(Net):
    """Returns something of the inside of its second block, past its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].first.register_forward_hook(lambda part, args, output: setattr(self, "kept", output))

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.head(self.kept[:, :WIDTH])


class Twice(Net):
    """Calls a part of each block outside the block's forward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block.norm(x))
        return self.head(x)


@pytest.mark.any_device
@pytest.mark.parametrize("net", [Inner, Twice])
def test_a_graph_that_enters_a_block_past_its_forward_is_an_error(make_trainer: Make, net: type[Net]) -> None:
    with pytest.raises(
        RuntimeError,
        match=mentions("inplace operation", "callback.weights_on_host.blocks", "~callback.weights_on_host"),
    ):
        fit(make_trainer, WeightsOnHost(), module=module_of(net()))


class Overwriting(Block):
    """Changes what its own backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)).mul_(2)


def test_an_error_of_autograd_about_other_tensors_stays_as_it_is(make_trainer: Make) -> None:
    net = Net()
    net.blocks = nn.ModuleList(Overwriting() for _ in range(BLOCKS))
    with pytest.raises(RuntimeError, match="inplace operation") as caught:
        fit(make_trainer, WeightsOnHost(), module=module_of(net))
    assert "weights_on_host" not in str(caught.value)


class Penalty(Net):
    """Reads weights of its blocks outside them."""

    def forward(self, x: Tensor) -> Tensor:
        weights = [block.first.weight.square().mean() for block in self.blocks]
        return super().forward(x) + torch.stack(weights).sum()


@pytest.mark.any_device
def test_weights_read_outside_their_blocks_give_no_wrong_numbers(make_trainer: Make) -> None:
    words = mentions("NaN outside its block", "callback.weights_on_host.blocks")
    with pytest.raises(RuntimeError, match=words):  # of autograd, or refused for a gradient that isn't finite
        fit(make_trainer, WeightsOnHost(), module=module_of(Penalty()))


@pytest.mark.any_device
def test_validation_test_and_prediction_without_a_fit_bring_all_weights(make_trainer: Make) -> None:
    module, batches = module_of().eval(), loader(2, width=WIDTH)
    technique = WeightsOnHost(window=2)
    plain = make_trainer(L).validate(copy.deepcopy(module), batches, verbose=False)
    trainer = make_trainer(L, callbacks=[technique])
    assert trainer.validate(module, batches, verbose=False) == plain
    assert technique.ring is not None
    assert technique.ring.copies == 2 * BLOCKS + 1  # the first of a third batch, ahead
    assert technique.ring.stores == 0
    expected = make_trainer(L).predict(copy.deepcopy(module), batches)
    assert equal([*trainer.predict(module, batches)], [*expected])


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.any_device
@pytest.mark.parametrize("others", ["alone", long("compact"), "some on the host", long("compact, mixed")])
def test_checkpoints_are_as_without_it_and_a_resumed_run_is_exact(
    make_trainer: Make, tmp_path: Path, others: str
) -> None:
    precision, techniques = TECHNIQUES[others]

    places = []

    def run(name: str, *callbacks: Any, **options: Any) -> tuple[Any, str]:
        watch, saves = (
            Watch(),
            ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1, filename="{step}"),
        )
        module, batches = module_of(), loader(3, width=WIDTH)
        trainer = make_trainer(
            L,
            callbacks=[watch, *callbacks, *techniques(), saves],
            max_epochs=2,
            enable_checkpointing=True,
            precision=precision,
        )
        if options:
            for p in module.parameters():
                p.data.mul_(0.5)  # all comes from the file
        torch.manual_seed(1)
        for block in module.net.blocks:
            block.drop.p = 0.0  # no random states are saved
        trainer.fit(module, batches, **options)
        places.append(watch.places)
        return module, str(tmp_path / name / "step=3.ckpt")

    plain, saved = run("plain", GradientRelease())
    whole, path = run("on_host", WeightsOnHost())
    files = [torch.load(each, weights_only=True, map_location="cpu") for each in (saved, path)]
    assert equal(files[0]["state_dict"], files[1]["state_dict"])
    states = [dict(sorted(file["optimizer_states"][0]["state"].items())) for file in files]
    assert equal(*states)
    assert abs(Path(path).stat().st_size - Path(saved).stat().st_size) < 4096
    for start in (path, saved):
        resumed, _ = run("resumed", WeightsOnHost(), ckpt_path=start)
        assert equal(resumed.cpu(), whole.cpu())
    assert equal(whole.cpu(), plain.cpu())
    assert all(each == places[0] for each in places)


class Fails(L.Callback):
    """Copies and saves the module within the fit, then fails before backward."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        trainer, pl_module.trainer = pl_module.trainer, None
        self.copy, file = copy.deepcopy(pl_module.net), io.BytesIO()
        torch.save(pl_module.net, file)
        pl_module.trainer = trainer
        file.seek(0)
        self.loaded = torch.load(file, weights_only=False, map_location="cpu")
        self.before = {name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()}

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == 1:
            self.saved = {name: value.clone() for name, value in pl_module.state_dict().items()}  # within a step
            raise KeyboardInterrupt("as a user's")


@pytest.mark.any_device
def test_copies_run_alone_and_an_exception_undoes_it(make_trainer: Make) -> None:
    module, fails = module_of(), Fails()
    parameters = dict(module.named_parameters())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(make_trainer, WeightsOnHost(), fails, module=module)
    module.cpu()
    assert dict(module.named_parameters()) == parameters  # the very same
    assert equal(dict(module.named_parameters()), fails.before)
    assert equal({name: value.cpu() for name, value in fails.saved.items()}, fails.before)
    assert all(ATTRIBUTES.isdisjoint(vars(each)) for each in module.modules())
    x = torch.ones(2, WIDTH)
    for each in (fails.copy.cpu(), fails.loaded):
        assert torch.equal(each.eval()(x), module.net.eval()(x))
    fit(make_trainer, WeightsOnHost(), module=module.train())  # again


def _every_second(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    """Step after each second batch alone, as Lightning's documentation shows for a discriminator."""
    optimizer.step(closure=closure) if batch_idx % 2 else closure()


@pytest.mark.cpu_only("it moves nothing")
def test_what_it_refuses(make_trainer: Make) -> None:
    def refused(*callbacks: Any, module: Any = None, **options: Any) -> str:
        with pytest.raises(ConflictError, match=r"~callback\.weights_on_host") as found:
            fit(make_trainer, WeightsOnHost(), *callbacks, module=module, **options)
        return str(found.value)

    assert "accumulate_grad_batches=1" in refused(accumulate_grad_batches=2)
    assert "manual" in refused(module=module_of(automatic_optimization=False))
    module = module_of()
    module.net.blocks[1].compile(backend="eager")
    assert "net.blocks.1 is compiled" in refused(module=module)
    module = module_of()
    for number in range(BLOCKS):
        module.net.blocks[number] = torch.compile(module.net.blocks[number])
    assert "net.blocks.0 is compiled" in refused(module=module)
    module = module_of()
    parameters = module.parameters()
    module.configure_optimizers = lambda: torch.optim.LBFGS(parameters)
    assert "LBFGS" in refused(module=module)
    module = module_of()
    module.optimizer_step = _every_second.__get__(module)
    assert "optimizer.step(closure=optimizer_closure)" in refused(module=module)
    scheduler = L.callbacks.GradientAccumulationScheduler({1: 2})
    assert "accumulate_grad_batches=2" in refused(scheduler, max_epochs=2)
    presets: list[dict[str, Any]] = [
        {"precision": "16-mixed"},
        {"accumulate_grad_batches": 4},
        {"callback": {"weight_averaging": {}}},
        {"callback": {"frozen_streaming": {}}},
        {"callback": {"pruning": {}}},
    ]
    for preset in presets:
        with pytest.raises(ConflictError, match=r"~callback\.weights_on_host"):
            compose({**preset, "callback": {"weights_on_host": {}, **preset.get("callback", {})}})
    module = module_of()
    module.net.order = []
    with pytest.warns(UserWarning, match=r"none of net\.blocks\.0.*was called"):
        fit(make_trainer, WeightsOnHost(), module=module, limit_val_batches=0)


@pytest.mark.long
def test_a_plan_has_the_buffers_the_host_and_the_copies() -> None:
    (batch,) = loader(1, width=WIDTH)
    presets = [
        {"precision": "32-true", "callback": callback}
        for callback in ({"gradient_release": {}}, {"weights_on_host": {}})
    ]
    planner = Planner(module_of, batch, {}, device("rtx-4090"), GiB)
    resident, on_host = (planner.plan("tried", compose(preset)) for preset in presets)
    assert resident.breakdown["weights"] - on_host.breakdown["weights"] == (BLOCKS - 3) * BLOCK - 4  # a NaN
    assert (on_host.host_bytes, resident.host_bytes) == (BLOCKS * BLOCK, 0)
    assert not resident.timeline
    assert busy(on_host.timeline, TO_DEVICE) > 0
    assert busy(on_host.timeline, TO_HOST) > 0
    assert on_host.seconds_per_step > resident.seconds_per_step


@pytest.mark.long
@pytest.mark.cpu_only("it plans for it")
def test_a_planned_fit_on_the_cpu_counts_all_in_one_memory(make_trainer: Make) -> None:
    (batch,) = loader(1, width=WIDTH)
    preset = {"precision": "32-true", "callback": {"weights_on_host": {}, "activation_checkpointing": {}}}
    plan = Planner(module_of, batch, {}, device("cpu"), GiB).plan("tried", compose(preset))
    held = Held()
    techniques = [WeightsOnHost(), ActivationCheckpointing(verify_recomputation=False)]
    make_trainer(L, callbacks=[*techniques, held]).fit(module_of(), DataLoader([batch] * 4, batch_size=None))
    assert plan.peak_bytes == held.peak_bytes


def language_model(kind: str) -> Any:
    """Return a LightningModule of a small model of transformers with four blocks."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4}
    rest = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    if kind == "gpt2":  # with tied embeddings
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=4, n_positions=32)
    elif kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        config = transformers.Qwen3MoeConfig(**small, **rest, **experts, output_router_logits=True)
    elif kind == "t5":
        config = transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=16, num_heads=2, d_ff=64, num_layers=4, decoder_start_token_id=0
        )
    else:
        config = transformers.LlamaConfig(**small, **rest)
    torch.manual_seed(0)
    automatic = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    model = automatic.from_config(config).train()
    model.blocks = nn.Module()  # what `Watch` looks at

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "moe", "gpt2", "t5"])
def test_models_of_transformers(make_trainer: Make, kind: str, recomputed: bool) -> None:
    def run(*callbacks: Any) -> tuple[Any, Watch]:
        module, watch = language_model(kind), Watch()
        others = [ActivationCheckpointing(verify_recomputation=False)] if recomputed else []
        ids = torch.randint(64, (4, 2, 12), generator=torch.Generator().manual_seed(3))
        torch.manual_seed(1)
        make_trainer(L, callbacks=[watch, *callbacks, *others]).fit(module, DataLoader(ids, batch_size=None))
        return module, watch

    technique = WeightsOnHost(window=2)
    assert_same(run(technique), run(GradientRelease()))
    assert technique.ring is not None
    assert technique.ring.stores >= 4 * 4
