"""DeepSpeed's configuration: ours and the user's merged, what contradicts refused by name, and read by DeepSpeed."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.errors import ConflictError, PresetError, SoloError
from lightning_solo.zero.config import (
    BUCKET_ELEMENTS,
    ELSEWHERE,
    check_zero_section,
    merge,
    zero_config,
)
from tests.messages import mentions
from tests.zero.engines import engine_of

pytest.importorskip("deepspeed", reason="listed on Linux only")
PINNED = {"device": "cpu", "pin_memory": True}


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": section}


def on_disk(path: str = "/nvme") -> dict[str, Any]:
    return {"device": "nvme", "pin_memory": True, "nvme_path": path}


# --- ours ---


def test_each_argument_sets_its_section() -> None:
    second, third = zero_config(2)["zero_optimization"], zero_config(3)["zero_optimization"]
    assert (second["stage"], third["stage"]) == (2, 3)
    assert second["offload_optimizer"] == third["offload_optimizer"] == PINNED
    assert "offload_param" not in second.keys() | third.keys()
    assert second["allgather_bucket_size"] == third["stage3_prefetch_bucket_size"] == BUCKET_ELEMENTS
    both = zero_config(3, offload_parameters=True, pin_memory=False)["zero_optimization"]
    assert both["offload_param"] == both["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    disk = zero_config(3, nvme_path="/nvme")["zero_optimization"]
    assert disk["offload_optimizer"] == on_disk()
    assert "offload_param" not in disk
    assert zero_config(3, offload_parameters=True, nvme_path="/nvme")["zero_optimization"]["offload_param"] == on_disk()


@pytest.mark.parametrize(
    "arguments", [{}, {"stage": 3}, {"stage": 3, "offload_parameters": True, "nvme_path": "/nvme"}]
)
def test_deepspeed_reads_it_as_it_is_meant(arguments: dict[str, Any]) -> None:
    section = zero_config(**arguments)["zero_optimization"]
    read = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(**copy.deepcopy(section))
    dumped = read.model_dump(by_alias=True)
    plain = {name: value for name, value in section.items() if not name.startswith("offload_")}
    assert {name: dumped[name] for name in plain} == plain
    assert read.offload_optimizer.device == section["offload_optimizer"]["device"]
    assert read.offload_optimizer.pin_memory is True
    assert (read.offload_param is not None) == ("offload_param" in section)


# --- the user's on top ---


def test_nothing_given_is_ours() -> None:
    for nothing in (None, {}):
        merged = merge(zero_config(), nothing)
        assert merged == zero_config()
        assert merged is not zero_config()


def test_users_values_replace_the_defaults() -> None:
    given = {
        "wall_clock_breakdown": True,
        **zero(reduce_bucket_size=7, offload_optimizer={"buffer_count": 5}, round={"a": 1}),
    }
    merged = merge(zero_config(), given)
    expected = zero_config()
    expected["wall_clock_breakdown"] = True
    expected["zero_optimization"] |= {"reduce_bucket_size": 7, "round": {"a": 1}}
    expected["zero_optimization"]["offload_optimizer"] = {**PINNED, "buffer_count": 5}
    assert merged == expected


def test_auto_is_ours() -> None:
    given = dict.fromkeys(ELSEWHERE, "auto")
    given |= {"fp16": {"enabled": "auto", "loss_scale": "auto"}, "bf16": {"enabled": "auto"}, "steps_per_print": "auto"}
    given |= zero(stage="auto", reduce_bucket_size="auto", offload_optimizer={"device": "auto", "pin_memory": "auto"})
    assert merge(zero_config(), given) == zero_config()
    for whole in ({"zero_optimization": "auto"}, zero(offload_optimizer="auto"), zero(zenflow="auto")):
        assert merge(zero_config(), whole) == zero_config()


def test_equal_values_are_accepted() -> None:
    both = zero_config(3, offload_parameters=True, nvme_path="/nvme")
    assert merge(both, zero(stage=3, offload_optimizer=on_disk(), offload_param=on_disk())) == both
    off = {"fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": False}, "activation_checkpointing": {}}
    assert merge(zero_config(), off) == zero_config()


@pytest.mark.parametrize(
    "section",
    [
        pytest.param({"device": "auto"}, id="auto"),
        pytest.param({"device": "none"}, id="what DeepSpeed calls no device"),
        pytest.param(None, id="null"),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_no_offload_param_is_what_ours_says_too(stage: int, section: Any) -> None:
    """DeepSpeed and our count of bytes take any section of that name for weights that are offloaded."""
    assert merge(zero_config(stage), zero(offload_param=section)) == zero_config(stage)


def test_neither_mapping_is_changed_and_none_is_shared() -> None:
    ours, given = zero_config(), zero(offload_optimizer={"buffer_count": 5}, round={"a": 1}, blocks=[4])
    before = copy.deepcopy((ours, given))
    merged = merge(ours, given)
    merged["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/elsewhere"
    merged["zero_optimization"]["round"]["a"] = 2
    merged["zero_optimization"]["blocks"].append(5)
    assert (ours, given) == before


# --- refused ---


@pytest.mark.parametrize("key", ELSEWHERE)
def test_misplaced_key_is_refused_with_the_remedy(key: str) -> None:
    values: dict[str, Any] = {
        "fp16": {"enabled": True},
        "bf16": {"enabled": True, "immediate_grad_update": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR"},
        "activation_checkpointing": {"partition_activations": True},
    }
    value = values.get(key, 3)
    with pytest.raises(ConflictError) as raised:
        merge(zero_config(), {key: value})
    assert str(raised.value) == f"zero_offload.config.{key}={value!r}: write {ELSEWHERE[key]} instead"


@pytest.mark.parametrize(
    ("section", "option", "ours"),
    [
        ({"stage": 3}, "stage=3", "2"),
        ({"stage": 0}, "stage=0", "2"),
        ({"offload_optimizer": {"device": "nvme"}}, "offload_optimizer.device='nvme'", "'cpu'"),
        ({"offload_optimizer": {"device": "none"}}, "offload_optimizer.device='none'", "'cpu'"),
        ({"offload_optimizer": {"nvme_path": "/other"}}, "offload_optimizer.nvme_path='/other'", "None"),
        ({"offload_optimizer": {"pin_memory": False}}, "offload_optimizer.pin_memory=False", "True"),
    ],
)
def test_a_contradiction_names_both(section: dict[str, Any], option: str, ours: str) -> None:
    with pytest.raises(ConflictError) as raised:
        merge(zero_config(2), zero(**section))
    words = (
        f"zero_offload.config.zero_optimization.{option}, but the strategy's own arguments make it {ours}; write one"
    )
    assert str(raised.value).startswith(words)
    assert "stage=, offload_parameters=, nvme_path= and pin_memory=" in str(raised.value)


@pytest.mark.parametrize("place", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [("device", "cpu", "nvme"), ("nvme_path", "/other", "/nvme"), ("pin_memory", False, True)],
)
def test_a_contradiction_in_either_place_is_named(place: str, name: str, value: Any, ours: Any) -> None:
    both = zero_config(3, offload_parameters=True, nvme_path="/nvme")
    with pytest.raises(ConflictError, match=mentions(f"{place}.{name}={value!r}", f" {ours!r}")):
        merge(both, zero(**{place: {name: value}}))
    assert merge(both, zero(**{place: {name: ours}})) == both


@pytest.mark.parametrize(
    "section", [PINNED, {"device": "cpu"}, on_disk(), {"pin_memory": True}, {"buffer_count": 3, "max_in_cpu": 10}]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_param_needs_the_argument(stage: int, section: dict[str, Any]) -> None:
    """A user who copies a section from DeepSpeed's tutorial would believe that the weights are offloaded."""
    with pytest.raises(ConflictError, match=mentions("offload_param=", ": write offload_parameters=True, and stage=3")):
        merge(zero_config(stage), zero(offload_param=section))


@pytest.mark.parametrize("value", [None, True, 2, "stage2", [1]])
def test_a_section_can_not_be_replaced_by_something_else(value: Any) -> None:
    for given in ({"zero_optimization": value}, zero(offload_optimizer=value)):
        with pytest.raises(ConflictError, match=mentions("zero_optimization", "section", "mapping")):
            merge(zero_config(), given)


# --- what DeepSpeed itself makes of keys that it doesn't know ---


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimizations", "zero_optimization"),
        ("gradient_clippping", "gradient_clipping"),
        ("optimiser", "optimizer"),
    ],
)
def test_a_misspelt_section_is_named(given: str, meant: str) -> None:
    """DeepSpeed passes over what it doesn't know at the top."""
    with pytest.raises(PresetError, match=rf"zero_offload\.config\.{given}:.*did you mean '{meant}'\?"):
        merge(zero_config(), {given: {"stage": 2}})


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"reduce_bucket_sizes": 7}, ["reduce_bucket_sizes: Extra inputs", ", 7"]),
        ({"offload_optimizer": {"pin_memori": True}}, ["offload_optimizer.pin_memori: Extra inputs"]),
        ({"reduce_bucket_size": "many"}, ["reduce_bucket_size: ", "integer", "'many'"]),
        ({"reduce_bucket_size": None}, ["reduce_bucket_size: ", "None"]),
        ({"a": 1, "overlap_comm": "perhaps"}, ["overlap_comm: ", "'perhaps'", "a: Extra inputs"]),
    ],
)
def test_invalid_zero_section_is_refused_by_name(section: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(PresetError, match=mentions(*named)) as raised:
        check_zero_section(merge(zero_config(), zero(**section)))
    assert isinstance(raised.value, SoloError)
    assert raised.value.__cause__ is None
    assert str(raised.value).startswith("zero_offload.config.zero_optimization: DeepSpeed refuses ")


@pytest.mark.parametrize(
    "arguments", [{}, {"stage": 3}, {"stage": 3, "offload_parameters": True, "nvme_path": "/nvme"}]
)
def test_valid_zero_section_is_unchanged(arguments: dict[str, Any]) -> None:
    given = zero(sub_group_size=1000, offload_optimizer={"ratio": 1.0, "super_offload": False}, zenflow=None)
    config = merge(zero_config(**arguments), given)
    before = copy.deepcopy(config)
    check_zero_section(config)
    assert config == before


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"offload_optimizer": {"ratio": 0.9}}, ["offload_optimizer.ratio=0.9: ", "allowed is 1", "leave ratio out"]),
        ({"offload_optimizer": {"ratio": 0}}, ["offload_optimizer.ratio=0: "]),
        (
            {"offload_optimizer": {"super_offload": True}},
            ["offload_optimizer.super_offload=True: ", "leave super_offload out", "preset compact_host"],
        ),
        ({"zenflow": {"topk_ratio": 0.1}}, ["zenflow: ", "leave zenflow out", "preset compact_host"]),
    ],
)
def test_options_that_deepspeed_trains_wrong_with_are_refused(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConflictError, match=mentions(*words)) as raised:
        merge(zero_config(), zero(**section))
    assert str(raised.value).startswith("zero_offload.config.zero_optimization.")


def test_a_wrong_name_that_is_like_none_reaches_deepspeed_which_passes_over_it() -> None:
    """DeepSpeed has some sixty keys at the top, not listed anywhere at run time; only ours can be guessed."""
    module = torch.nn.Linear(2, 1)
    merged = merge(zero_config(), {"prescale_gradient": True})
    assert merged["prescale_gradient"] is True
    with engine_of(module, torch.optim.SGD(module.parameters(), lr=0.1), more={"prescale_gradient": True}) as engine:
        assert engine._config.prescale_gradients is False


# --- from a file ---


def test_a_file_is_read_as_a_mapping_is(tmp_path: Path) -> None:
    given = {"steps_per_print": 7, **zero(reduce_bucket_size=5, sub_group_size="auto")}
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(given), encoding="utf-8")
    assert merge(zero_config(), str(file)) == merge(zero_config(), given)
    assert merge(zero_config(), str(file))["zero_optimization"]["reduce_bucket_size"] == 5
    file.write_text(json.dumps(zero(stage=3)), encoding="utf-8")
    with pytest.raises(ConflictError, match="stage=3"):
        merge(zero_config(), str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["No such file"]),
        ("{'stage': 2}", ["Expecting property name"]),
        ("", ["Expecting value"]),
        ("[1, 2]", ["list", " mapping"]),
        ('"auto"', ["str", " mapping"]),
        ("null", ["NoneType", " mapping"]),
        ("{\ud800".encode("utf-8", "surrogatepass"), ["codec can't decode"]),
    ],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str | bytes | None, words: list[str]) -> None:
    file = tmp_path / "zero.json"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(PresetError, match=mentions(*words)) as raised:
        merge(zero_config(), str(file))
    assert str(raised.value).startswith(f"zero_offload.config={str(file)!r}: ")


def test_a_section_without_a_name_is_named() -> None:
    with pytest.raises(PresetError, match=mentions("zero_offload.config: ", "key 1", "section")):
        merge(zero_config(), {1: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("given", [[1], 3, True])
def test_config_that_is_no_mapping_and_no_path_is_refused(given: Any) -> None:
    with pytest.raises(PresetError, match=mentions(f"zero_offload.config={given}", "mapping", "JSON file")):
        merge(zero_config(), given)
