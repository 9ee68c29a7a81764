"""A process group without a launcher: opened, shared with the user's, closed; and what no run can start on."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightning_solo.errors import CapabilityError
from lightning_solo.processes import SET_BY_IMPORTS, environment
from lightning_solo.seams.homes import fabric_part, for_home
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.deepspeed_internals import forget_process_group
from lightning_solo.zero.process import (
    ONE_PROCESS,
    SUPPORTED,
    close_process_group,
    one_process,
    open_process_group,
    require_deepspeed,
    require_device,
    without_deprecations,
)
from tests.messages import mentions
from tests.modules import loader, regression

pytest.importorskip("deepspeed", reason="listed on Linux only")
CPU = torch.device("cpu", 0)


@pytest.fixture
def no_group() -> Iterator[None]:
    """Close what a test leaves open."""
    yield
    close_process_group()


def open_ones_own(world_size: int = 1) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=world_size)


def sums_over_one_process() -> bool:
    """Return whether torch's group and DeepSpeed's handle on it work."""
    from deepspeed import comm

    tensor = torch.tensor([3.0])
    comm.all_reduce(tensor)
    return comm.get_world_size() == 1 and tensor.item() == 3.0


# --- the group ---


@pytest.mark.usefixtures("no_group")
def test_it_is_opened_used_and_closed_again_and_again() -> None:
    before = (dict(os.environ), threading.active_count(), sys.excepthook)
    for _ in range(3):
        assert open_process_group("gloo")
        assert torch.distributed.get_world_size() == 1
        assert sums_over_one_process()
        assert sys.excepthook is before[2]
        close_process_group()
        assert not torch.distributed.is_initialized()
        assert (dict(os.environ), threading.active_count(), sys.excepthook) == before
    close_process_group()


@pytest.mark.usefixtures("no_group")
def test_it_needs_no_address_and_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's variables promise a second process at an address that nobody has."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert open_process_group("gloo")
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    assert os.environ["RANK"] == "1"
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    assert type(store) is torch.distributed.HashStore  # a dictionary in this process
    assert "mpi4py" not in sys.modules


@pytest.mark.usefixtures("no_group")
def test_nothing_is_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed builds an operator for the processes of one machine, unless it is told that it is built."""
    operators: Any = importlib.import_module("deepspeed.comm.torch")

    def build() -> None:
        raise AssertionError("a build")

    monkeypatch.setattr(operators, "build_shm_op", build)
    open_process_group("gloo")
    assert operators.build_shm_op is build  # for whoever calls it afterwards


@pytest.mark.usefixtures("no_group")
def test_a_users_group_is_taken_and_kept() -> None:
    open_ones_own()
    group = torch.distributed.group.WORLD
    assert not open_process_group("gloo")
    assert torch.distributed.group.WORLD is group
    assert sums_over_one_process()


@pytest.mark.usefixtures("no_group")
def test_a_group_that_stays_is_forgotten() -> None:
    """Whether its owner keeps it, closes it, or opens another."""
    for _ in range(2):
        open_ones_own()
        assert not open_process_group("gloo")
        forget_process_group()
        assert torch.distributed.is_initialized()
        assert importlib.import_module("deepspeed.comm.comm").cdb is None
        assert not open_process_group("gloo")
        assert sums_over_one_process()
        forget_process_group()
        torch.distributed.destroy_process_group()
    assert open_process_group("gloo")
    assert sums_over_one_process()


@pytest.mark.usefixtures("no_group")
def test_a_group_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    open_ones_own()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(CapabilityError, match=mentions("group of 2", "without a launcher")):
        open_process_group("gloo")
    assert torch.distributed.is_initialized()


@pytest.mark.usefixtures("no_group")
def test_a_failure_of_deepspeeds_leaves_no_group_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    operators: Any = importlib.import_module("deepspeed.comm.torch")
    build = operators.build_shm_op

    def failing(*_: Any, **__: Any) -> None:
        assert os.environ["WORLD_SIZE"] == "1"
        raise ArithmeticError("on purpose")

    before = dict(os.environ)
    monkeypatch.setattr(deepspeed, "init_distributed", failing)
    with pytest.raises(ArithmeticError, match="on purpose"):
        open_process_group("gloo")
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before
    assert operators.build_shm_op is build
    open_ones_own()
    with pytest.raises(ArithmeticError, match="on purpose"):
        open_process_group("gloo")
    assert torch.distributed.is_initialized()  # the user's


@pytest.mark.usefixtures("no_group")
@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
def test_a_user_may_close_a_group_and_fit_again(make_trainer: Any) -> None:
    """First a fit in the user's group, which stays; then one without, which opens its own."""
    import lightning.pytorch as home

    def fit() -> None:
        strategy = for_home(ZeroOffloadStrategy, home.__name__)(allow_cpu=True, host_optimizer="torch")
        make_trainer(home, strategy=strategy).fit(regression(home), loader(2))

    open_ones_own()
    fit()
    torch.distributed.destroy_process_group()
    with environment(ONE_PROCESS):  # restores them where a failing fit doesn't
        fit()
    assert not torch.distributed.is_initialized()


# --- the environment ---


def test_variables_are_set_and_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLO_THERE", "before")
    monkeypatch.delenv("SOLO_NOT", raising=False)
    before = dict(os.environ)

    def change() -> None:
        assert (os.environ["SOLO_THERE"], os.environ["SOLO_NOT"]) == ("now", "now")
        os.environ["SOLO_NOT"] = "something else"
        del os.environ["SOLO_THERE"]
        monkeypatch.setenv("SOLO_USER", "1")
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"), environment({"SOLO_THERE": "now", "SOLO_NOT": "now"}):
        change()
    assert dict(os.environ) == {**before, "SOLO_USER": "1"}


def test_environment_variables_set_by_imports_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SET_BY_IMPORTS:
        monkeypatch.delenv(name, raising=False)
        with environment({}):
            os.environ[name] = "1"
        assert name not in os.environ
        monkeypatch.setenv(name, "the user's")
        with environment({}):
            os.environ[name] = "1"
        assert os.environ[name] == "the user's"


# --- warnings ---


def test_two_deprecations_are_kept_quiet_for_a_while() -> None:
    """Of what torch says in every step of stage 3; whatever else it says is heard."""

    def say(function: str, category: type[Warning] = FutureWarning) -> None:
        warnings.warn(f"`torch.distributed.{function}` is deprecated, use another", category, stacklevel=2)

    before = list(warnings.filters)
    with without_deprecations():
        say("all_gather_into_tensor")
        say("reduce_scatter_tensor")
        # Warnings are errors here; pytest.warns would set the filters aside.
        with pytest.raises(FutureWarning, match="broadcast"):
            say("broadcast")
        with pytest.raises(UserWarning, match="reduce_scatter_tensor"):
            say("reduce_scatter_tensor", UserWarning)
    assert list(warnings.filters) == before
    with pytest.raises(FutureWarning, match="all_gather"):
        say("all_gather_into_tensor")
    with without_deprecations():
        warnings.filterwarnings("ignore", message="of the user's")
        added = warnings.filters[0]
    assert list(warnings.filters) == [added, *before]
    with without_deprecations():
        warnings.resetwarnings()


# --- one process, whatever a launcher says ---


def test_a_launchers_variables_change_nothing(home: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "3", "LOCAL_RANK": "3", "NODE_RANK": "2", "GROUP_RANK": "2", "WORLD_SIZE": "4"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    environment_class = fabric_part(home.__name__, "plugins.environments").LightningEnvironment
    found = one_process(environment_class)
    assert isinstance(found, environment_class)
    assert (found.local_rank(), found.node_rank(), found.global_rank(), found.world_size()) == (0, 0, 0, 1)
    before = dict(os.environ)
    found.teardown()
    assert dict(os.environ) == before
    # With and without: Lightning's own believes them.
    assert environment_class().local_rank() == 3
    for name in launcher:
        monkeypatch.delenv(name)
    assert found.creates_processes_externally is True  # nobody is to start others
    assert environment_class().creates_processes_externally is False


# --- DeepSpeed ---


@pytest.mark.parametrize(
    "found",
    ["0.19.7", "0.16.9", "0.2", "0.19.8.dev1", "0.19.8rc2", "0.20.0", "0.20.0.dev1", "0.20.0rc1", "1.0"],
)
def test_one_that_is_too_old_or_untested_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    with pytest.raises(CapabilityError) as raised:
        require_deepspeed()
    assert str(raised.value) == (
        f"zero_offload needs deepspeed >=0.19.8,<0.20, and {found} is installed;"
        " write: DS_BUILD_OPS=0 pip install 'deepspeed>=0.19.8,<0.20'"
    )


def test_the_versions_are_those_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"deepspeed{SUPPORTED}; platform_system' in project
    tested = (Path(__file__).parents[2] / "constraints.txt").read_text()
    (version,) = re.findall(r"^deepspeed==(.+)$", tested, re.MULTILINE)
    assert version in SpecifierSet(SUPPORTED)
    assert Version(version).minor + 1 == Version(SUPPORTED.partition("<")[2]).minor


@pytest.mark.parametrize("found", ["0.19.8", "0.19.10", "0.19.99", "0.19.8+abc123", "0.19.9.dev1"])
def test_a_newer_one_of_the_same_minor_is_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    before = dict(os.environ)
    require_deepspeed()
    assert dict(os.environ) == before


def test_an_old_one_stops_the_strategy_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.17.0")
    with pytest.raises(CapabilityError, match=mentions("0.17.0 is installed")):
        for_home(ZeroOffloadStrategy)()


# --- the device ---


@pytest.mark.parametrize(
    ("device", "arguments", "words"),
    [
        pytest.param(CPU, {}, ["CUDA", "'cpu'", "strategy.allow_cpu=true"], id="CPU"),
        pytest.param(torch.device("mps", 0), {}, ["CUDA", "'mps'"], id="another"),
        pytest.param(
            torch.device("mps", 0),
            {"allow_cpu": True},
            ["on 'cuda', or with allow_cpu on 'cpu'; not on 'mps'"],
            id="no CPU",
        ),
        pytest.param(
            torch.device("cuda", 1),
            {},
            ["cuda:1", "write CUDA_VISIBLE_DEVICES=1 and devices=1"],
            id="second",
        ),
    ],
)
def test_a_device_is_refused_by_name(device: torch.device, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CapabilityError, match=mentions(*words)):
        require_device(device, **{"allow_cpu": False, **arguments})


def test_another_accelerator_of_deepspeeds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed chooses once, when it is imported: by DS_ACCELERATOR, or by what it finds."""
    accelerator: Any = importlib.import_module("deepspeed.accelerator")
    other = "cpu" if accelerator.get_accelerator().device_name() == "cuda" else "cuda"
    words = rf"has chosen '\w+' for this process, and the run is on '{other}'; start it with DS_ACCELERATOR={other}"
    with pytest.raises(CapabilityError, match=words):
        require_device(torch.device(other, 0), allow_cpu=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed's accelerator is CUDA here")
def test_the_cpu_is_let_through_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=mentions("CPU", "allow_cpu=True", "no memory")):
        require_device(CPU, allow_cpu=True)
