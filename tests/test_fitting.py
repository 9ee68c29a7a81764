"""Presets that fit where one did not: by the room that is given, and after a run that was refused for its memory."""

from __future__ import annotations

import functools
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import nn

import lightning_solo as solo
from lightning_solo import fitting
from lightning_solo.cards.configuration import Configuration, Target
from lightning_solo.cards.footprint import Request, Sizes, plain_footprint
from lightning_solo.errors import BudgetError, CapabilityError, PresetError
from lightning_solo.fitting import Room, free_room, model_states, presets_that_fit
from lightning_solo.machine import host_memory
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.compact_states.card import Settings, footprint
from lightning_solo.techniques.zero_offload import technique as zero_offload
from lightning_solo.units import MiB
from lightning_solo.zero.budget import layout_of
from lightning_solo.zero.checkpoint import groups_of
from tests.conftest import long
from tests.messages import lines_with
from tests.modules import Stack, loader, regression

MARGIN = 1.05


@functools.cache
def composed(name: str) -> Configuration:
    """A preset as the library ships it, composed once for all tests: Hydra takes a tenth of a second for each."""
    return compose(name)


COMPACT = [name for name in preset_files() if name.startswith(("compact", "stream"))]


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "compose", composed)


def every(config: Configuration) -> None:
    """Accept every preset, as on a machine that can run all of them."""


def named(text: str) -> dict[str, str]:
    """Return what a sentence says: preset -> what it needs."""
    return dict(re.findall(r"(\w+) \(([^)]+)\)", text))


# --- room that is given ---


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("on_gpu", "once")
def test_offloading_fits_where_the_device_is_small() -> None:
    """200 million parameters; the device has room for 16-bit weights and the buckets, or for the half of it all."""
    layers = nn.ModuleList([nn.Linear(1000, 1000, bias=False, device="meta") for _ in range(200)])
    n = 200 * 10**6
    small, large = Room(6 * n, 64 * n), Room(20 * n, 64 * n)
    offloading = set(named(presets_that_fit(layers, every, small)))
    assert {"zero_offload", "zero_offload_parameters"} <= offloading
    # 8, 16 and 16 bytes per parameter
    assert not {"bf16_true", "bf16", "baseline"} & offloading
    assert offloading < set(named(presets_that_fit(layers, every, large)))
    # Without room on the host, what the device has is all there is.
    alone = named(presets_that_fit(layers, every, Room(20 * n, 10 * MiB)))
    assert {"bf16_true", "bf16", "baseline"} <= set(alone)
    assert not {name for name in alone if name.startswith("zero_offload")}
    assert alone["bf16_true"] == f"{8 * n * MARGIN / 2**30:.2f} GiB on the device"
    assert " on the device and " in named(presets_that_fit(layers, every, small))["zero_offload"]


@pytest.mark.usefixtures("on_gpu", "once")
def test_where_none_fits_the_nearest_is_the_one_that_lacks_least() -> None:
    layer = nn.Linear(1000, 1000, bias=False, device="meta")
    # 2 bytes per parameter on the device and 3.06 on the host
    assert set(named(presets_that_fit(layer, every, Room(5 * 10**6, 10**7)))) >= {"compact_host"}
    text = presets_that_fit(layer, every, Room(5 * 10**6, 0))
    # compact lacks 5 % of 5.06 bytes per parameter, and 0.06; the others all their states, or a bucket
    assert lines_with(text, "compact", "5.07 MiB on the device", "before activations", "AdamW", "smaller model")


@pytest.mark.parametrize(
    ("back_end", "precision", "each"),
    [
        ("torchao_8bit", "bf16-true", 2 + 2 + 2 * 4 / 256),
        ("torchao_8bit", "32-true", 4 + 2 + 2 * 4 / 256),
        ("bitsandbytes_8bit", "bf16-mixed", 4 + 2 + 2 * 4 / 256),
        ("flashoptim", "bf16-true", 2 + 1 + 2 + 2 * 2 / 32),
    ],
)
def test_states_of_other_libraries_are_counted_by_their_sizes(back_end: str, precision: str, each: float) -> None:
    gradient = 2 if precision == "bf16-true" else 4
    request = Request(Sizes((256_000,), (), 0), precision, 1, cuda=True)
    device = footprint(Settings(back_end=back_end), request, plain_footprint(request)).device
    assert device == 256_000 * (each + gradient)


@pytest.mark.parametrize("name", ["compact", "gradient_release"])
def test_released_gradients_that_accumulate_need_their_sum(name: str) -> None:
    """4 bytes per parameter, by a factor or by a schedule, on the device or on the host."""
    sizes, mib = Sizes((2**20,), (), 0), 4 * 2**20 * MARGIN

    def room(*overrides: str) -> Room:
        need = model_states(compose(name, overrides), sizes, cuda=True)
        assert need is not None
        return need

    for accumulates in ("accumulate_grad_batches=4", "+callback=accumulation_schedule"):
        assert room(accumulates).device - room().device == pytest.approx(mib, abs=1)
        on_host = room(accumulates, "callback.gradient_release.buffer=host")
        assert (on_host.device, on_host.host) == (room().device, pytest.approx(mib, abs=1))


@pytest.mark.usefixtures("once")
def test_frozen_parameter_needs_only_its_weight() -> None:
    module = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False))
    module[0].requires_grad_(False)
    module.register_buffer("table", torch.zeros(1000, 500))
    # 4 + 16 bytes for the two layers' elements, 4 for the buffer's
    need = int((4 * 10**6 + 16 * 10**6 + 4 * 500_000) * MARGIN)
    assert "baseline" in named(presets_that_fit(module, every, Room(0, need)))
    assert "baseline" not in named(presets_that_fit(module, every, Room(0, need), failed="baseline"))
    assert "packing" not in named(presets_that_fit(module, every, Room(0, 100 * need)))  # it takes what bf16 does
    assert "baseline" not in named(presets_that_fit(module, every, Room(0, need - 1)))


@pytest.mark.usefixtures("once")
def test_a_module_of_which_nothing_is_trained_needs_no_optimizer() -> None:
    module = nn.Linear(10, 10).requires_grad_(False)
    found = named(presets_that_fit(module, every, Room(0, MiB)))
    assert "baseline" in found
    assert "zero_offload" not in found  # it refuses to run without an optimizer


@pytest.mark.usefixtures("once")
def test_where_no_preset_runs_it_says_so() -> None:
    def none(config: Configuration) -> None:
        raise CapabilityError("not here")

    assert presets_that_fit(nn.Linear(1, 1), none, Room(0, MiB)).startswith("no preset runs")


def test_a_users_preset_counts_and_a_broken_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / "solo"
    folder.mkdir(parents=True)
    # Its head is that of the library's presets.
    head = "# Of mine. Runs on: CPU.\ndefaults:\n  - /solo/schema@_here_: solo\n  - _self_\n"
    (folder / "of_mine.yaml").write_text(f"{head}precision: bf16-true\n")
    (folder / "broken.yaml").write_text(f"{head}precisoin: bf16-true\n")
    monkeypatch.chdir(tmp_path)
    found = named(presets_that_fit(nn.Linear(1000, 1000, bias=False), every, Room(0, 2**30)))
    assert found["of_mine"] == found["bf16_true"]
    assert "broken" not in found


@pytest.mark.usefixtures("once")
def test_room_that_is_not_given_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(1000, 1000, bias=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fitting, "host_memory", lambda: (2**40, 10 * MiB))
    # The module's own bytes would be given back.
    assert free_room(module) == Room(0, 10 * MiB + 4 * 10**6)
    assert set(named(presets_that_fit(module, every))) == {"bf16_true", "gradient_release", *COMPACT}
    monkeypatch.setattr(fitting, "host_memory", lambda: (2**40, MiB))
    assert lines_with(presets_that_fit(module, every), "no preset would fit", "compact", "5.07 MiB")


def test_presets_that_this_machine_cannot_run_are_left_out() -> None:
    def only_fp16(config: Configuration) -> None:
        if config.precision != "16-mixed":
            raise PresetError("not here")

    text = presets_that_fit(nn.Linear(10, 10), only_fp16, Room(0, 2**30))
    assert "fp16" in text
    assert "bf16" not in text


def test_model_states_on_a_gpu() -> None:
    sizes = Sizes((1_000_000, 200_000), (100_000,), 64)
    # 4 + 4 + 8 per trained parameter, 4 per frozen one
    assert model_states(compose("bf16"), sizes, cuda=True) == Room(int((16 * 1_200_000 + 4 * 100_000 + 64) * MARGIN), 0)
    need = model_states(compose("zero_offload", ["strategy.pin_memory=false", "precision=32-true"]), sizes, cuda=True)
    assert need is not None
    # master 4, gradients 4, states 8, the copy out 4; the scratch of the largest
    assert need.host == int((20 * 1_200_000 + 4 * 1_000_000) * MARGIN)
    # 64-true is no precision of DeepSpeed's, and a strategy of the user's is not known
    assert model_states(replace(compose("zero_offload"), precision="64-true"), sizes, cuda=True) is None
    theirs = Configuration(foreign=(Target("strategy", {"_target_": "mine.Strategy"}, ()),))
    assert model_states(theirs, sizes, cuda=True) is None


# --- what the strategy itself will ask for ---


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["zero_offload", "zero_offload_parameters"])
def test_the_advice_counts_as_the_strategy_does(name: str) -> None:
    config = composed(name)
    assert config.strategy is not None
    module = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 1))
    zero = for_home(zero_offload.ZeroOffloadStrategy)(**vars(config.strategy.settings)).config
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)  # which keeps what DeepSpeed's does
    precision = str(config.precision)
    theirs = layout_of(module, groups_of(optimizer), optimizer, zero, precision=precision, accumulates=False, cuda=True)
    sizes = Sizes(tuple(p.numel() for p in module.parameters()), (), 0)
    ours = fitting.model_states(config, sizes, cuda=True)
    assert ours is not None
    assert ours.host == pytest.approx(MARGIN * theirs.host_bytes, rel=1e-6)


# --- a run that was refused ---

WIDTH, AVAILABLE = 256, 5 * MiB


def small(home: ModuleType = lightning.pytorch) -> Any:
    return regression(home, Stack(blocks=1, width=WIDTH))


def refused(make_trainer: Any, module: Any, preset: bool, home: ModuleType = lightning.pytorch) -> BudgetError:
    """Return the error of a fit on the CPU, by the preset or with the strategy alone."""
    if preset:
        overrides = ["strategy.allow_cpu=true", "strategy.host_optimizer=torch"]
        arguments = solo.trainer_kwargs("zero_offload", overrides, lightning=home.__name__)
    else:
        strategy = for_home(zero_offload.ZeroOffloadStrategy, home.__name__)(allow_cpu=True, host_optimizer="torch")
        arguments = {"strategy": strategy, "precision": "bf16-mixed"}
    with pytest.raises(BudgetError) as raised:
        make_trainer(home, **arguments).fit(module, loader(2, width=WIDTH))
    return raised.value


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 5 MiB, and an engine that must not be made."""
    deepspeed = pytest.importorskip("deepspeed", reason="listed on Linux only")

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine was made")

    for place in (zero_offload, fitting):
        monkeypatch.setattr(place, "host_memory", lambda: (2**40, AVAILABLE))
    monkeypatch.setattr(deepspeed, "initialize", too_late)
    monkeypatch.setattr(deepspeed.zero, "Init", too_late)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
@pytest.mark.parametrize("preset", [long(True), False])
def test_it_shows_numbers_and_with_a_preset_those_that_fit(home: ModuleType, make_trainer: Any, preset: bool) -> None:
    module = small(home)
    n = sum(p.numel() for p in module.parameters())
    error = refused(make_trainer, module, preset, home)
    first, *second = str(error).split("\n")
    assert error.available == AVAILABLE + 4 * n  # what the module holds is given back
    assert error.needed > error.available
    assert lines_with(first, f"{error.needed / MiB:.2f} MiB of host memory", f"{error.available / MiB:.2f} MiB")
    assert f"{(error.needed - error.available) / MiB:.2f} MiB" in first
    # Of a few parts, by hand: master and gradients 4 bytes each, states 8, with one element for the padding
    padded = n + n % 2
    assert f"master {4 * padded / MiB:.2f} MiB, gradients {4 * padded / MiB:.2f} MiB" in first
    assert f"states {8 * padded / MiB:.2f} MiB" in first
    if preset:
        (advice,) = second
        assert lines_with(advice, "presets that would fit", "before activations", "AdamW: ")
        # 8 bytes per parameter are 4 MiB, 5.06 are 2.5, 12 are 6; baseline's 16 are 8 MiB, of 7.
        assert set(named(advice)) == {"bf16_true", "gradient_release", *COMPACT}
    else:
        assert second == []


@pytest.mark.usefixtures("little_memory", "once")
@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
def test_where_nothing_fits_the_nearest_is_named(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "host_memory", lambda: (2**40, 0))
    message = str(refused(make_trainer, small(), preset=True))
    assert lines_with(message, "no preset would fit", "compact", "MiB on the host", "smaller model")


@pytest.mark.usefixtures("little_memory")
@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
def test_module_and_process_are_as_before(make_trainer: Any) -> None:
    module = small()

    def marks() -> Any:
        parts = [(name, sorted(vars(part))) for name, part in module.net.named_modules()]
        parameters = [(p.dtype, p.shape, p.requires_grad, sorted(vars(p))) for p in module.parameters()]
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
        return parts, parameters, hooks, dict(os.environ), threading.active_count()

    before, weights = marks(), [p.detach().clone() for p in module.parameters()]
    for _ in range(2):
        refused(make_trainer, module, preset=False)
        assert marks() == before
        assert all(torch.equal(p, q) for p, q in zip(module.parameters(), weights, strict=True))
        assert not torch.distributed.is_initialized()
    # It is not in the way of what fits.
    make_trainer(lightning.pytorch).fit(module, loader(2, width=WIDTH))
    assert not torch.equal(module.net.head.weight, weights[-2])


@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
def test_with_the_memory_of_this_machine_it_runs(make_trainer: Any) -> None:
    pytest.importorskip("deepspeed", reason="listed on Linux only")
    assert host_memory()[1] > AVAILABLE
    overrides = ["strategy.allow_cpu=true", "strategy.host_optimizer=torch"]
    trainer = make_trainer(lightning.pytorch, **solo.trainer_kwargs("zero_offload", overrides))
    trainer.fit(small(), loader(2, width=WIDTH))
    assert trainer.global_step == 2
