"""Fixtures that every test may use: a quiet Trainer of either home of Lightning, and nothing left behind."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import lightning.pytorch  # both homes first: importing them sets environment variables
import pytest
import pytorch_lightning
import torch

from tests.simcuda.build import UnavailableError

hypothesis.settings.register_profile("solo", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("solo")
HOMES = (lightning.pytorch.__name__, pytorch_lightning.__name__)

long = partial(pytest.param, marks=pytest.mark.long)
"""A set of arguments with which a test runs in `make test-all` alone, since others show the same."""

ENGINE = ("tests/zero/", "tests/techniques/test_zero_offload")
WITHOUT_ENGINE = (
    "test_checkpoint_states.py",
    "test_config.py",
    "test_deepspeed_names.py",
    "test_disk.py",
    "test_layout.py",
    "test_process.py",
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `make test-all` the other home of Lightning, but for the seams', and tests of DeepSpeed's engine.

    What protects a change has them all the same: the seams of both homes, and the contract of `zero_offload`. Tests of
    the CPU alone are skipped where `any_device` means CUDA.
    """
    root, on_cuda = Path(__file__).parents[1], runs_on_cuda(config)
    for item in items:
        for mark in item.iter_markers("cpu_only") if on_cuda else ():
            item.add_marker(pytest.mark.skip(reason=f"of the CPU alone: {mark.args[0]}"))
        path = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
        callspec = getattr(item, "callspec", None)
        other_home = callspec is not None and callspec.params.get("home") == HOMES[1]
        if other_home and not path.startswith("tests/seams/"):
            item.add_marker(pytest.mark.long)
        if path.startswith(ENGINE) and item.path.name not in WITHOUT_ENGINE:
            item.add_marker(pytest.mark.long)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the rows of faults of a test's marker to its parameter id, such as ``test_x[row 40]``."""
    if (marker := metafunc.definition.get_closest_marker("row")) is not None:
        name = "row_of_faults"
        metafunc.fixturenames.append(name)
        metafunc.parametrize(name, [None], ids=[" ".join(f"row {number}" for number in marker.args)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that reads or steers the simulated CUDA device where there is a real one."""
    try:
        return (yield)
    except UnavailableError as error:
        if not torch.cuda.is_available() or item.config.pluginmanager.has_plugin("tests.simcuda.plugin"):
            raise
        pytest.skip(str(error))


def pytest_collection_finish() -> None:
    """Spare each garbage collection what was imported, with which it takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect() -> None:
    """Spare the collections of a file's tests what earlier files have imported, compiled and cached.

    On a device a tensor in a reference cycle would then stay, and tests there count its memory.
    """
    if not torch.cuda.is_available():
        gc.collect()
        gc.freeze()


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the two packages whose Trainer people use; their classes are not the same."""
    return importlib.import_module(request.param)


def runs_on_cuda(config: pytest.Config) -> bool:
    """Return whether tests marked `any_device` run on CUDA: a simulated device, or a real one by ``-m any_device``."""
    asked = config.pluginmanager.has_plugin("tests.simcuda.plugin") or "any_device" in config.option.markexpr
    return asked and torch.cuda.is_available()


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> str:
    """Where a test's Trainer runs: a test marked `any_device` on CUDA if they are asked for there, else on the CPU."""
    return "gpu" if runs_on_cuda(request.config) and request.node.get_closest_marker("any_device") else "cpu"


@pytest.fixture
def device(accelerator: str) -> torch.device:
    """The device of `accelerator`."""
    return torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")


@pytest.fixture
def make_trainer(tmp_path: Path, accelerator: str) -> Callable[..., Any]:
    """Return a function that makes a quiet Trainer: ``make_trainer(home, max_epochs=2, ...)``."""

    def make(home: ModuleType, **kwargs: Any) -> Any:
        quiet = {
            "accelerator": accelerator,
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": str(tmp_path),
            "max_epochs": 1,
        }
        return home.Trainer(**{**quiet, **kwargs})

    return make


@pytest.fixture
def preset_with_caveat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a user's own preset with a technique that has a caveat."""
    file = tmp_path / "conf" / "solo" / "thinned.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("defaults:\n  - /solo/schema@_here_: [solo]\n  - callback: [layer_drop]\n  - _self_\n")
    monkeypatch.chdir(tmp_path)
    return "thinned"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves environment variables, the default dtype or a working directory changed.

    Signals get their handlers back: Lightning ignores SIGINT from the first one on.
    """
    before = (dict(os.environ), torch.get_default_dtype(), os.getcwd(), torch.is_grad_enabled())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch.manual_seed(0)
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    # Lightning's, as soon as it looks for CUDA devices, and Inductor's, as soon as it compiles
    others = {"CUDA_DEVICE_ORDER", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
    allowed = {"PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", *others}
    after = {key: value for key, value in os.environ.items() if key not in allowed}
    expected = {key: value for key, value in before[0].items() if key not in allowed}
    changed = {key for key in {*after, *expected} if after.get(key) != expected.get(key)}
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    assert (torch.get_default_dtype(), os.getcwd(), torch.is_grad_enabled()) == before[1:]
