"""Messages of the command line name overrides with the prefix `solo.`, so that they can be pasted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from lightning_solo.cli import _show_warning, refuse
from lightning_solo.cli.command_line import check_command_line
from lightning_solo.cli.doctor import lacking
from lightning_solo.errors import PresetError
from lightning_solo.presets.spelling import on_command_line
from tests.messages import mentions


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("write ~callback.throughput", "write ~solo.callback.throughput"),
        ("write +callback=[a,b], or callback.a.x={y:1}", "write +solo/callback=[a,b], or solo.callback.a.x={y:1}"),
        ("write strategy.stage=3 precision=32", "write solo.strategy.stage=3 solo.precision=32"),
        ("write ~strategy, or ~callback.inplace", "write solo.strategy=null, or ~solo.callback.inplace"),
        ("auto.presets=[bf16] would", "solo.auto.presets=[bf16] would"),
        ("'callback=x': write +solo/callback=x", "'callback=x': write +solo/callback=x"),
        ("trainer.precision=16 and Trainer(strategy='auto')", "trainer.precision=16 and Trainer(strategy='auto')"),
        ("add ddp, such as ['ddp', 'bf16']", "add ddp, such as 'solo=[ddp,bf16]'"),
        ("strings, such as ['precision=32-true']", "strings, such as ['precision=32-true']"),
        ("a strategy. A callback, auto", "a strategy. A callback, auto"),
    ],
)
def test_overrides_get_the_prefix_once(python: str, shell: str) -> None:
    assert on_command_line(python) == shell
    assert on_command_line(shell) == shell


def test_refusals_and_warnings_are_printed_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        refuse("write ~callback.throughput")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.simplefilter("always")
        warnings.warn("write ~callback.attention", stacklevel=1)
    printed = capsys.readouterr().err
    assert "write ~solo.callback.throughput\n" in printed
    assert "write ~solo.callback.attention\n" in printed


def test_doctors_remedies_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = lacking("offloading")
    assert said is not None
    option = "solo.callback.activation_offloading.allow_cpu=true"
    assert said.endswith(option)
    check_command_line(["solo=offloading", option])


@pytest.mark.parametrize("override", ["~strategy", "~solo.strategy", "~precision", "~solo.callback"])
def test_a_field_is_left_out_by_null(override: str) -> None:
    remedy = f"solo.{override.removeprefix('~').removeprefix('solo.')}=null"
    with pytest.raises(PresetError, match=mentions(override, f"write {remedy}")):
        check_command_line(["solo=zero_offload", override])
    check_command_line(["solo=zero_offload", remedy])
    check_command_line(["solo=zero_offload", "+solo/callback=inplace", "solo.strategy=null"])
