"""Values of secret environment variables are found by name and replaced in texts and containers."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from omegaconf import OmegaConf

from lightning_solo.secret_values import NAME, print_error, secret_in, without_secrets

SECRET = "s3cret-of-the-environment"
SECRETS = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "A_SECRET", "DB_PASSWORD", "openai_apikey", "KEY"]
SECRETS += ["PGPASSWORD", "DB_PWD", "SSH_PASSPHRASE"]


@pytest.mark.parametrize("name", SECRETS)
def test_name_of_a_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert secret_in(["a", {"b": (1, f"x{SECRET}y")}]) == name
    assert without_secrets(f"a {SECRET}") == f"a ${name}"
    assert without_secrets({"a": [SECRET, 1], "b": (None, f"{SECRET}!")}) == {
        "a": [f"${name}", 1],
        "b": (None, f"${name}!"),
    }
    nested = OmegaConf.create({"a": {"b": [f"x{SECRET}"]}})
    assert secret_in(nested) == name
    assert without_secrets({"cfg": nested}) == {"cfg": {"a": {"b": [f"x${name}"]}}}


@pytest.mark.parametrize(
    "name", ["HOME", "GIT_AUTHOR_NAME", "KEYBOARD", "TOKENIZERS_PARALLELISM", "PATH", "PWD", "OLDPWD"]
)
def test_other_names(name: str) -> None:
    assert NAME.search(name) is None


def test_short_values_occur_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "1")
    assert without_secrets("1 of 10") == "1 of 10"
    assert secret_in("1 of 10") is None


def test_a_secret_within_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    monkeypatch.setenv("B_KEY", f"{SECRET}-longer")
    assert without_secrets(f"{SECRET}-longer {SECRET}") == "$B_KEY $A_KEY"


def test_the_container_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    before = OrderedDict(a=SECRET)
    assert without_secrets(before) == OrderedDict(a="$A_KEY")
    assert before == OrderedDict(a=SECRET)


def test_traceback_without_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        print_error(type(error), error, error.__traceback__)
    output = capsys.readouterr().err
    assert "ValueError: $A_KEY" in output
    assert SECRET not in output
