"""A pytest plugin, ``-p tests.simcuda.plugin``: tests run on the simulated CUDA device, and a test that raced fails.

If the device isn't available, every test is skipped with the reason. Tests that need a feature that it doesn't
simulate, ``@pytest.mark.gpu(needs="time")`` or ``"kernels"``, are always skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.simcuda import device
from tests.simcuda.build import UnavailableError

_reason = ""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install the device before a conftest imports torch."""
    global _reason
    try:
        device.install()
        importlib.import_module("tests.simcuda.triton_kernels").install()
    except UnavailableError as error:
        _reason = f"no simulated CUDA device: {error}"


def pytest_report_header() -> str:
    """Return the line that names the device of the tests."""
    return _reason or "cuda: simulated on the CPU, races are looked for"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that can't run on the device."""
    for item in items:
        for mark in item.iter_markers("not_simulated"):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
        if _reason:
            item.add_marker(pytest.mark.skip(reason=_reason))
        for mark in item.iter_markers("gpu"):
            if needs := mark.kwargs.get("needs"):
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU's {needs}, which aren't simulated"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that had races which it didn't read by `device.races`."""
    if not device.is_installed():
        return (yield)
    device.forget()
    try:
        result = yield
    finally:
        found = device.races()
        words = f"{len(found)} races on the simulated CUDA device:\n" + "\n".join(f"  {race}" for race in found)
        if found:
            item.add_report_section("call", "races", words)
    if found:
        pytest.fail(words, pytrace=False)
    return result
