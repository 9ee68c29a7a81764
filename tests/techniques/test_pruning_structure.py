"""Channels and heads are removed before a fit, with the states of its checkpoint, and a smaller module is resumed."""

from __future__ import annotations

import copy
import inspect
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError, SoloError
from lightning_solo.export.sparse_weights import load
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.pruning.technique import Pruning
from lightning_solo.units import format_bytes
from tests.messages import mentions
from tests.modules import loader, regression
from tests.training import equal

Make = Callable[..., Any]
WIDTH, HIDDEN, STEPS = 8, 24, 8
SMALLER = {"net.up.weight": (12, 8), "net.up.bias": (12,), "net.down.weight": (8, 12)}
HALF: dict[str, Any] = {"amount": 0.5, "pattern": "channels"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
]


class Net(nn.Module):
    """A residual layer of channels, and attention with two heads on a sequence of one row."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.heads = 2
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, len(x), 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2)[0])
        return self.head(x + self.down(torch.tanh(self.up(x))))


def module_of() -> Any:
    torch.manual_seed(0)
    return regression(L, Net())


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    module = module or module_of()
    options = {name: arguments.pop(name) for name in ("ckpt_path", "weights_only") if name in arguments}
    trainer = make_trainer(L, callbacks=[*callbacks], **{"max_steps": STEPS, **arguments})
    torch.manual_seed(2)
    trainer.fit(module, loader(STEPS, width=WIDTH), **options)
    return module


class Normed(nn.Module):
    """Layers with running statistics between them, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.up(x)).relu()))


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def kept_channels(module: Any) -> Tensor:
    """Return the half of the channels with the largest norms of their weights, in order."""
    net = module.net
    norms = net.up.weight.detach().square().sum(1) + net.down.weight.detach().square().sum(0)
    return norms.topk(HIDDEN // 2).indices.sort().values


@torch.no_grad()
def cut(module: Any, kept: Tensor) -> None:
    """Make a module smaller by hand."""
    up, down = nn.Linear(WIDTH, len(kept)), nn.Linear(len(kept), WIDTH)
    up.weight.copy_(module.net.up.weight[kept])
    up.bias.copy_(module.net.up.bias[kept])
    down.weight.copy_(module.net.down.weight[:, kept])
    down.bias.copy_(module.net.down.bias)
    module.net.up, module.net.down = up, down


def test_a_fit_is_that_of_a_module_made_smaller_by_hand(make_trainer: Make) -> None:
    by_hand = module_of()
    keys = list(by_hand.state_dict())
    cut(by_hand, kept_channels(by_hand))
    ours = fit(make_trainer, Pruning(**HALF))
    assert shapes(ours) == {**shapes(module_of()), **SMALLER}
    assert (ours.net.up.out_features, ours.net.down.in_features) == (12, 12)
    assert equal(ours.state_dict(), fit(make_trainer, module=by_hand).state_dict())
    assert list(ours.state_dict()) == keys
    assert copy.deepcopy(ours.net)(torch.ones(2, WIDTH)).shape == (2, 1)


def test_heads_are_removed_with_their_number(make_trainer: Make) -> None:
    module = fit(make_trainer, Pruning(amount=0.5, pattern="heads"))
    assert module.net.heads == 1
    assert shapes(module)["net.qkv.weight"] == (12, 8)
    assert shapes(module)["net.out.weight"] == (8, 4)


class Encoder(nn.Module):
    """torch's own layers, whose kernels for evaluation compute the width of a head from the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[None], src_key_padding_mask=torch.zeros(1, len(x), dtype=torch.bool))[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{"pattern": "heads", "amount": 0.5}, HALF], ids=["heads", "channels"])
def test_encoders_of_torch_are_trained_and_exported_without_some(
    options: dict[str, Any], make_trainer: Make, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = fit(make_trainer, Pruning(**options), module=regression(L, Encoder())).eval()
    is_of_heads = options["pattern"] == "heads"
    assert shapes(module)["net.body.layers.1.self_attn.in_proj_weight"] == (12 if is_of_heads else 24, 8)
    assert shapes(module)["net.body.layers.1.linear2.weight"] == (8, 16 if is_of_heads else 8)
    x = torch.randn(3, WIDTH)
    expected = module.net(x).detach()
    solo.export_pruned(module, tmp_path / "pruned")
    solo.export_quantized(module, tmp_path / "quantized", bits=8, group_size=0)
    for folder, tolerance in (("pruned", 1e-6), ("quantized", 0.05)):
        file = tmp_path / folder / "load.py"
        assert "from lightning_solo" not in file.read_text()
        loaded = runpy.run_path(str(file))["load"](regression(L, Encoder()), file.parent).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded.net(x), expected, rtol=0, atol=tolerance)
    assert not equal(loaded.net(x), expected)  # of 8 bits


def test_names_threshold_and_scope_choose(make_trainer: Make) -> None:
    both = fit(make_trainer, Pruning(amount=0.25, pattern="channels", layers=["up"]))
    assert shapes(both)["net.up.weight"] == (18, 8)
    assert shapes(fit(make_trainer, Pruning(**HALF, scope="global")))["net.up.weight"] == (12, 8)
    norms = (module_of().net.up.weight.square().sum(1) + module_of().net.down.weight.square().sum(0)).sqrt()
    bound = float(norms.detach().sort().values[5:7].mean())
    module = fit(make_trainer, Pruning(threshold=bound, pattern="channels"))
    assert shapes(module)["net.up.weight"] == (18, 8)


def saved(make_trainer: Make, folder: Path, *callbacks: Any, step: int = 5) -> tuple[Any, Path]:
    saving = ModelCheckpoint(folder, filename="saved", every_n_train_steps=step)
    module = fit(make_trainer, *callbacks, ExactResume(), saving, enable_checkpointing=True)
    return module, folder / "saved.ckpt"


@pytest.mark.parametrize("options", [HALF, {"amount": 0.5, "pattern": "heads"}], ids=["channels", "heads"])
def test_a_resumed_run_ends_as_the_uninterrupted_one(options: Any, make_trainer: Make, tmp_path: Path) -> None:
    whole, path = saved(make_trainer, tmp_path, Pruning(**options))
    resumed = fit(make_trainer, Pruning(**options), ExactResume(), ckpt_path=path, weights_only=True)
    assert equal(resumed.state_dict(), whole.state_dict())
    loaded = solo.load_pruned(module_of(), path)
    assert shapes(loaded) == shapes(whole)
    assert loaded.net.heads == whole.net.heads
    trainer = make_trainer(L, callbacks=[Pruning(**options)])
    trainer.validate(module := module_of(), loader(2, width=WIDTH), ckpt_path=path, weights_only=True, verbose=False)
    assert equal(module.state_dict(), loaded.state_dict())


def test_states_of_a_dense_checkpoint_are_cut_to_the_kept_channels(make_trainer: Make, tmp_path: Path) -> None:
    _, path = saved(make_trainer, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    by_hand = module_of()
    by_hand.load_state_dict(checkpoint["state_dict"])
    kept = kept_channels(by_hand)
    cut(by_hand, kept)
    names = [name for name, _ in by_hand.named_parameters()]
    indices = {"net.up.weight": (0, kept), "net.up.bias": (0, kept), "net.down.weight": (1, kept)}
    states = checkpoint["optimizer_states"][0]["state"]
    for number, name in enumerate(names):
        if name in indices:
            for key in ("exp_avg", "exp_avg_sq"):
                states[number][key] = states[number][key].index_select(*indices[name])
    checkpoint["state_dict"] = by_hand.state_dict()
    torch.save(checkpoint, tmp_path / "by_hand.ckpt")
    expected = fit(make_trainer, ExactResume(), module=by_hand, ckpt_path=tmp_path / "by_hand.ckpt", weights_only=True)
    ours = fit(make_trainer, Pruning(**HALF), ExactResume(), ckpt_path=path, weights_only=True)
    assert equal(ours.state_dict(), expected.state_dict())


def test_states_without_the_shape_of_their_weight_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    _, path = saved(make_trainer, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["exp_avg"] = state["exp_avg"].flatten()
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=mentions("exp_avg", "net.up.weight", "load_state_dict")):
        fit(make_trainer, Pruning(**HALF), ckpt_path=path, weights_only=True)


# --- removed at a later step ---

LATER: dict[str, Any] = {**HALF, "begin": 3}
CUBIC: dict[str, Any] = {**HALF, "amount": 0.75, "schedule": "cubic", "begin": 1, "end": 6, "every_n_steps": 2}


class CutByHand(L.Callback):
    """Cuts weights and moments before the fourth step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 3:
            return
        kept = kept_channels(pl_module)
        states = trainer.optimizers[0].state
        for name, (dim, index) in {"up.weight": (0, kept), "up.bias": (0, kept), "down.weight": (1, kept)}.items():
            p = pl_module.net.get_parameter(name)
            p.data, p.grad = p.data.index_select(dim, index), None
            for key in ("exp_avg", "exp_avg_sq"):
                states[p][key] = states[p][key].index_select(dim, index)


def test_at_a_later_step_weights_and_moments_are_cut(make_trainer: Make) -> None:
    ours = fit(make_trainer, Pruning(**LATER))
    assert shapes(ours) == {**shapes(module_of()), **SMALLER}
    assert equal(ours.state_dict(), fit(make_trainer, CutByHand()).state_dict())


def test_removals_follow_a_cubic_schedule(make_trainer: Make) -> None:
    class Watch(L.Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.seen += [len(pl_module.net.up.weight)]

    fit(make_trainer, Pruning(**CUBIC), watch := Watch())
    shares = [0, 0, 0, 1 - 0.6**3, 1 - 0.6**3, 1 - 0.2**3, 1, 1]
    assert watch.seen == [HIDDEN - round(0.75 * share * HIDDEN) for share in shares]


@pytest.mark.parametrize(
    ("options", "steps", "batches"),
    [
        (LATER, (2, 3, 5), 1),
        pytest.param(CUBIC, range(1, STEPS), 1, marks=pytest.mark.long),
        pytest.param({**CUBIC, "end": 3, "every_n_steps": 1}, (1, 2, 3), 2, marks=pytest.mark.long),
        pytest.param({**LATER, "pattern": "heads"}, range(1, STEPS), 1, marks=pytest.mark.long),
        pytest.param({"pattern": "channels", "threshold": 0.82, "begin": 3}, (2, 4), 2, marks=pytest.mark.long),
    ],
)
def test_runs_are_resumed_before_and_after_a_removal(
    options: Any, steps: Any, batches: int, make_trainer: Make, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    arguments = {"accumulate_grad_batches": batches, "max_steps": STEPS // batches}
    whole = fit(make_trainer, Pruning(**options), ExactResume(), saving, enable_checkpointing=True, **arguments)
    assert shapes(whole) != shapes(module_of())
    for step in steps:
        path = tmp_path / f"step={step}.ckpt"
        resumed = fit(make_trainer, Pruning(**options), ExactResume(), ckpt_path=path, weights_only=True, **arguments)
        assert equal(resumed.state_dict(), whole.state_dict())
        weights = solo.load_pruned(module_of(), path).state_dict()
        assert equal(weights, torch.load(path, weights_only=True)["state_dict"])


def test_copies_of_running_statistics_and_averages_follow(make_trainer: Make) -> None:
    torch.manual_seed(0)
    guarded = regression(L, Normed())
    others = solo.FiniteGuard(policy="skip_window"), solo.WeightAverage(start_step=3)
    fit(make_trainer, Pruning(**LATER), *others, module=guarded)
    assert guarded.net.norm.running_mean.shape == (12,)
    assert others[1].averaged_weights["net.down.weight"].shape == (WIDTH, 12)


def test_what_keeps_larger_tensors_is_refused_with_a_later_step(make_trainer: Make, tmp_path: Path) -> None:
    low_bit = (solo.OptimizerReplacement(optimizer=name) for name in ("adamw_8bit", "adamw_4bit"))
    for other in (solo.GradientRelease(), solo.FiniteGuard(policy="rewind"), solo.CompactStates(), *low_bit):
        with pytest.raises(ConflictError, match=mentions("at step 3", "larger shapes", "begin=0")):
            fit(make_trainer, Pruning(**LATER), other)
    _, path = saved(make_trainer, tmp_path)
    with pytest.raises(PresetError, match=mentions("begin=3", "step 5", "begin=5")):
        fit(make_trainer, Pruning(**LATER), ckpt_path=path, weights_only=True)


def test_running_statistics_are_cut_and_trained_and_other_attributes_stay(make_trainer: Make) -> None:
    torch.manual_seed(0)
    module = regression(L, Normed())
    module.net.warmup = HIDDEN
    fit(make_trainer, Pruning(**HALF), module=module)
    assert module.net.warmup == HIDDEN  # no width of a layer
    assert module.net.norm.running_mean.shape == (12,)
    assert int(module.net.norm.num_batches_tracked) == STEPS  # none of the trial steps is counted
    assert module.net.head.weight.shape == (1, WIDTH)


def test_a_second_fit_removes_nothing_more_and_another_amount_counts_from_the_first(make_trainer: Make) -> None:
    module = fit(make_trainer, Pruning(**HALF))
    fit(make_trainer, Pruning(**HALF), module=module)
    assert shapes(module)["net.up.weight"] == (12, 8)
    fit(make_trainer, Pruning(amount=0.75, pattern="channels"), module=module)
    assert shapes(module)["net.up.weight"] == (6, 8)
    fit(make_trainer, Pruning(amount=0.5, pattern="heads"), module=module)
    record = module.pruned_structure
    assert record["sizes"]["net.up.weight"] == [[24, 8], [6, 8]]
    assert record["numbers"]["net.heads"] == 1


@pytest.mark.long
def test_the_export_loads_without_the_package(make_trainer: Make, tmp_path: Path) -> None:
    module = fit(make_trainer, Pruning(amount=0.75, pattern="channels"))
    fit(make_trainer, Pruning(amount=0.5, pattern="heads"), module=module)
    solo.export_pruned(module, tmp_path / "small")
    x = torch.ones(3, WIDTH)
    torch.save((x, module.net(x).detach()), tmp_path / "expected.pt")
    source = "import torch\nfrom torch import Tensor, nn\nWIDTH, HIDDEN = 8, 24\n" + inspect.getsource(Net)
    (tmp_path / "user_net.py").write_text(source, encoding="utf-8")
    code = """
        import sys, torch
        class Absent:
            def find_spec(self, name, *_):
                if name.split(".")[0] in ("lightning_solo", "torchao", "lightning"):
                    raise ModuleNotFoundError(name)
        sys.path[:0] = [".", "small"]
        sys.meta_path.insert(0, Absent())
        from load import load
        from user_net import Net
        x, expected = torch.load("expected.pt")
        model = torch.nn.Module()
        model.net = net = Net()
        print("equal", torch.equal(load(model, "small").net(x), expected), net.heads, net.up.out_features)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "equal True 1 6", done.stderr


def test_the_export_has_the_smaller_sizes(make_trainer: Make, tmp_path: Path) -> None:
    module, path = saved(make_trainer, tmp_path, Pruning(**HALF), step=STEPS)
    lines = solo.export_pruned(module, tmp_path / "small")
    dense, small = (sum(p.nbytes for p in each.parameters()) for each in (module_of(), module))
    assert f"bytes: {format_bytes(dense)} before" in lines[1]
    assert small < (tmp_path / "small" / "model.safetensors").stat().st_size < small + 1500
    assert equal(load(module_of(), tmp_path / "small").state_dict(), module.state_dict())
    with pytest.raises(ValueError, match=mentions("expected", "24")):
        load(regression(L, Net(hidden=20)), tmp_path / "small")
    (line,) = solo.export_pruned(path, tmp_path / "of_file")[2:]
    assert line.startswith("3 tensors")


def test_batches_and_random_numbers_are_those_of_a_run_without(make_trainer: Make) -> None:
    class Watch(L.Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.seen += [batch[0].clone(), torch.rand(1)]

    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(WIDTH, generator=generator), torch.zeros(1)) for _ in range(32)]
    watches = []
    for callbacks in ([], [Pruning(**HALF)]):
        watches.append(Watch())
        order = torch.Generator().manual_seed(5)
        data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=order)  # type: ignore[arg-type]
        torch.manual_seed(1)
        make_trainer(L, callbacks=[*callbacks, watches[-1]], max_steps=STEPS).fit(module_of(), data)
    assert equal(watches[0].seen, watches[1].seen)


# --- refused ---

BAD: list[tuple[type[SoloError], dict[str, Any], tuple[str, ...]]] = [
    (ConflictError, {**HALF, "schedule": "regrow", "end": 3}, ("schedule=regrow", "schedule=once")),
    (PresetError, {**HALF, "begin": STEPS}, (f"begin={STEPS}", f"{STEPS} optimizer steps", "begin=4")),
    (ConflictError, {**HALF, "begin": 3, "layers": ["qkv"]}, ("net.qkv", "isn't computed by a layer", "net.down")),
    (NothingToDoError, {"pattern": "channels"}, ("callback.pruning.amount=0.5",)),
    (NothingToDoError, {"amount": 0.2, "pattern": "heads"}, ("no heads", "amount=0.5")),
    (NothingToDoError, {"threshold": 1e-9, "pattern": "channels"}, ("smallest norm",)),
    (ConflictError, {"amount": 0.99, "pattern": "heads"}, ("all 2 heads", "net.out", "kept=[net.out]")),
    (NothingToDoError, {**HALF, "layers": ["nowhere"]}, ("callback.pruning.layers='nowhere'",)),
    (ConflictError, {**HALF, "layers": ["qkv"]}, ("net.qkv", "isn't computed by a layer", "net.down")),
    (ConflictError, {**HALF, "layers": ["head"]}, ("net.head", "reads too", "net.down")),
    (ConflictError, {**HALF, "layers": ["net.out"]}, ("net.out", "pattern=heads")),
    (NothingToDoError, {**HALF, "kept": ["down"]}, ("net.down (in callback.pruning.kept)", "pattern=unstructured")),
]


@pytest.mark.parametrize(("kind", "options", "words"), BAD, ids=[str(each[1]) for each in BAD])
def test_settings_that_cannot_work_are_refused(kind: Any, options: Any, words: Any, make_trainer: Make) -> None:
    module = module_of()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(kind, match=mentions(*words)):
        fit(make_trainer, Pruning(**options), module=module)
    assert equal(module.state_dict(), before)


def test_modules_that_cannot_become_smaller_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    for name in ("net.up", "net.down"):
        module = module_of()
        module.get_parameter(f"{name}.weight").data[3, 3] = float("nan")
        with pytest.raises(ConflictError, match=mentions(f"{name}.weight", "NaN", "finite_guard")):
            fit(make_trainer, Pruning(**HALF), module=module)
    module = module_of()
    module.net.up.weight.requires_grad_(False)
    with pytest.raises(NothingToDoError, match=mentions("net.up.weight is frozen")):
        fit(make_trainer, Pruning(**HALF), module=module)
    module = module_of()
    module.net.experts = nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(ConflictError, match=mentions("net.experts", "linear layer", "net.down")):
        fit(make_trainer, Pruning(**HALF, layers=["experts"]), module=module)
    module = module_of()
    module.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("manual optimization", "pattern=unstructured")):
        fit(make_trainer, Pruning(**HALF), module=module)
    with pytest.raises(ConflictError, match=mentions("EMAWeightAveraging", "layers")):
        fit(make_trainer, Pruning(**HALF), EMAWeightAveraging(decay=0.9))
    _, path = saved(make_trainer, tmp_path)
    smaller = fit(make_trainer, Pruning(**HALF))
    with pytest.raises(CheckpointError, match=mentions("new module")):
        fit(make_trainer, Pruning(**HALF), module=smaller, ckpt_path=path, weights_only=True)
