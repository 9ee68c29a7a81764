"""From names and overrides to a checked configuration; the rows of the fault matrix that a configuration shows."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import lightning_solo as solo
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.presets.compose import VERSION_BASE, compose, compose_all, compose_yaml
from lightning_solo.presets.config_source import FIELDS
from lightning_solo.presets.files import describe, preset_files
from lightning_solo.presets.parse import PRECISIONS
from tests.conftest import long
from tests.messages import lines_with, mentions, nearest

PRESETS = tuple(sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "library" / "solo").glob("*.yaml")))


def refused(preset: Any, *overrides: str, allow: tuple[str, ...] = (), error: type[Exception] = PresetError) -> str:
    with pytest.raises(error) as caught:
        compose(preset, overrides, allow=allow)
    return str(caught.value)


def callbacks(configuration: Configuration) -> dict[str, Any]:
    return {chosen.card.name: chosen.settings for chosen in configuration.techniques if chosen.card.group == "callback"}


MARKS = ("", "+", "++")
MISSPELT = "callback.memory_logger.every_n_stepz"
ALLOWED = "+callback.x._target_=mine.X"
MISTAKES: list[tuple[str, list[str], list[str]]] = [
    ("bf61", [], ["'bf61'", nearest("bf16"), ", ".join(PRESETS)]),
    ("[checkpointing, compact]", [], ["['checkpointing', 'compact']"]),
    ("checkpointing,compact", [], ["['checkpointing', 'compact']"]),
    ("throughput", [], ["+callback=throughput"]),
    *(("bf16", [f"{mark}accumulat=4"], ["accumulat=4: ", nearest("accumulate_grad_batches")]) for mark in MARKS),
    *(("checkpointing", [f"{mark}{MISSPELT}=4"], [MISSPELT, nearest("every_n_steps")]) for mark in MARKS),
    *(
        ("checkpointing", [override], [nearest("memory_logger")])
        for override in (
            "callback.memory_loger.table=true",
            "+callback=memory_loger",
            "+callback.memory_loger.table=true",
            "~callback.memory_loger",
        )
    ),
    *(
        ("bf16", [f"accumulate_grad_batches={value}"], ["accumulate_grad_batches=", "at least 1"])
        for value in ("abc", "4.7", "true", "1e3", "0", "-1", "[2]", "2.5")
    ),
    *(
        ("checkpointing", [f"callback.memory_logger.every_n_steps={value}"], ["every_n_steps=", "integer"])
        for value in ("abc", "2.5", "true", "null", "[1]")
    ),
    ("bf16", ["precision=123"], ["precision=123: "]),
    ("bf16", ["precision=bf61"], [nearest("bf16"), "32-true, 16-mixed, bf16-mixed"]),
    ("bf16", ["precision=16-true", "precision=32-true"], ["'precision=16-true' and 'precision=32-true'"]),
    ("bf16", ["num_nodes=2"], ["one device"]),
    *(
        ("bf16", [override], ["os.system"])
        for override in (
            "+callback.x._target_=os.system",
            "+callback.x={_target_:os.system,command:ls}",
            "+callback.memory_logger.file={_target_:os.system}",
            "+strategy={_target_:os.system}",
        )
    ),
    *(
        ("bf16", [ALLOWED, nested], ["allow"])
        for nested in (
            "+callback.x.z={_target_:os.system}",
            "+callback.x.z=[{_target_:os.system}]",
            "+callback.x.z=[[{a:{_target_:os.system}}]]",
            "+callback.x._args_=[{_target_:code.interact}]",
            "+callback.x.z={_target_:torch.load}",
        )
    ),
    ("checkpointing", ["every_k=2"], ["callback.activation_checkpointing.every_k=2"]),
    ("checkpointing", ["+callback.activation_checkpointing.every_k=2"], ["write callback.activation_checkpointing.e"]),
    ("bf16", ["trainer.max_epochs=3"], ["L.Trainer(**trainer_kwargs(...), max_epochs=3)"]),
    ("bf16", ["callbacks.x=1"], [nearest("callback")]),
    ("bf16", ["solo.precision=32-true"], ["write precision=32-true"]),
    ("bf16", ["+solo/callback=throughput"], ["write +callback=throughput"]),
    ("bf16", ["~solo.callback.throughput"], ["write ~callback.throughput"]),
    ("bf16", ["every_n_steps=2"], ["callback.memory_logger.every_n_steps=2 or", "callback.throughput.every_n_steps=2"]),
]


@pytest.mark.parametrize(("preset", "overrides", "words"), MISTAKES)
def test_mistakes_are_refused_with_the_remedy(preset: str, overrides: list[str], words: list[str]) -> None:
    message = refused(preset, *overrides, allow=("mine",))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("preset", "override", "words"),
    [
        ("accumulation", "accumulate_grad_batches=4", "milestones=[[0,4]]"),
        ("zero_offload", "precision=64-true", "precision=32-true"),
        ("bf16", "devices=2", "one device"),
        ("checkpointing", "+callback.again={name:memory_logger}", "twice"),
    ],
)
def test_conflicts_are_refused(preset: str, override: str, words: str) -> None:
    assert words in refused(preset, override, error=ConflictError)


def test_schedules_beside_a_factor_of_1_and_under_deepspeed_are_allowed() -> None:
    compose("accumulation", ["accumulate_grad_batches=1"])
    assert "accumulation_schedule" in callbacks(compose("zero_offload", ["+callback=accumulation_schedule"]))


@pytest.mark.row(81)
def test_target_in_an_interpolation_is_refused() -> None:
    cfg = OmegaConf.create({"bad": "os.system", "solo": {"callback": {"x": {"_target_": "${bad}"}}}})
    assert "os.system" in refused(cfg.solo)


@pytest.mark.parametrize("value", ["\\${oc.env:HOME}", "logs/\\${solo.precision}.csv"])
def test_escaped_interpolation_is_refused(value: str) -> None:
    """Resolved once more, by whoever gets the fields, it would be another value than the one that was checked."""
    fields = {"precision": "32-true", "callback": {"memory_logger": {"file": value}}}
    with pytest.raises(PresetError, match=mentions("callback.memory_logger.file=", "${", "write the value itself")):
        compose(fields)


def test_the_warning_of_a_combination_names_the_callers_line() -> None:
    for call in (solo.trainer_kwargs, solo.show, compose):
        with pytest.warns(UserWarning, match="replaces") as caught:
            call(["checkpointing", "compact"])
        assert {warning.filename for warning in caught} == {__file__}


def test_list_of_presets_in_a_hydra_application_is_checked_as_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "solo").mkdir()
    (tmp_path / "solo" / "mine.yaml").write_text("callback: {throughput: {every_n_steps: 3}}")
    (tmp_path / "listed.yaml").write_text("defaults:\n- solo: [checkpointing, compact, mine]\n- _self_\n")
    (tmp_path / "settled.yaml").write_text("defaults: [listed, _self_]\nsolo: {precision: 32-true}\n")
    settled = "{precision: 32-true, callback: {compact_states: {master_bits: 32}}}"
    (tmp_path / "settled.yaml").write_text(f"defaults: [listed, _self_]\nsolo: {settled}\n")
    (tmp_path / "single.yaml").write_text("defaults:\n- solo: compact\n")

    def said(name: str, *overrides: str, added: Sequence[str] = ()) -> tuple[str, list[str]]:
        with initialize_config_dir(str(tmp_path), **VERSION_BASE):
            cfg = hydra_compose(name, overrides=list(overrides), return_hydra_config=True)
            monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return compose(cfg.solo, added).preset, [str(warning.message) for warning in caught]

    preset, (warning,) = said("listed")
    assert preset == "[checkpointing,compact,mine]"
    assert lines_with(
        warning, "precision='bf16-true' of preset compact", "checkpointing", "override solo.precision=..."
    )
    preset, (warning,) = said("single", "solo=[compact,checkpointing]")
    assert preset == "[compact,checkpointing]"
    assert lines_with(warning, "precision='bf16-mixed' of preset checkpointing")
    assert said("single") == ("compact", [])
    assert said("listed", "solo.precision=bf16-true")[1] == []
    assert said("listed", added=["precision=bf16-true"])[1] == []
    assert said("settled")[1] == []  # which no preset has chosen
    with pytest.raises(ConflictError, match=mentions("bf16 and fp16", "replaces every field")):
        said("single", "solo=[bf16,fp16]")


def test_overrides_of_an_application_that_change_no_preset_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.yaml").write_text("defaults:\n- solo: checkpointing\n- optional callback: null\n")
    (tmp_path / "callback").mkdir()
    (tmp_path / "callback" / "own.yaml").write_text("x: 1")

    def composed_with(override: str) -> Any:
        with initialize_config_dir(str(tmp_path), **VERSION_BASE):
            cfg = hydra_compose("app", overrides=[override], return_hydra_config=True)
            monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
            return compose(cfg.solo)

    for override, words in (
        ("+solo/callbak=throughput", ["'+solo/callbak=throughput'", nearest("callback")]),
        ("solo/callback=throughput", ["replace every callback", "write +solo/callback=throughput", "~solo.callback."]),
        ("solo.callback=throughput", ["solo.callback='throughput'", "write +solo/callback=throughput"]),
        ("solo.strategy=compact", ["solo.strategy.name='compact'", "the preset compact"]),
        ("solo.strategy=zero_offload", ["solo.strategy='zero_offload'", "+solo/strategy=zero_offload"]),
    ):
        with pytest.raises(PresetError, match=mentions(*words)):
            composed_with(override)
    with pytest.warns(UserWarning, match=mentions("'+precision=32-true'", "write solo.precision=32-true")):
        composed_with("+precision=32-true")
    assert composed_with("+solo/callback=[throughput]").has("throughput")
    assert composed_with("callback=own").has("activation_checkpointing")  # the application's group of this name


def test_two_added_callbacks_are_written_as_a_list() -> None:
    message = refused("bf16", "+callback=throughput", "+callback=[leak_finder]")
    assert "write +callback=[throughput,leak_finder]" in message
    assert set(callbacks(compose("bf16", ["+callback=[throughput,leak_finder]"]))) == {"throughput", "leak_finder"}


def test_every_preset_is_listed_and_composes() -> None:
    assert tuple(solo.list_presets()) == PRESETS
    for name in PRESETS:
        assert compose(name).precision in {*PRECISIONS.values(), None}


@pytest.mark.parametrize("name", PRESETS)
def test_first_line_says_what_for_and_where(name: str) -> None:
    purpose, found, device = describe(preset_files()[name]).partition(" Runs on: ")
    assert found
    assert len(purpose) > 20
    assert device == ("CUDA." if compose(name).needs_cuda() else "any device.")


def test_overrides_take_lightnings_names() -> None:
    config = compose(
        "checkpointing", ["precision=32", "accumulate_grad_batches=4", "callback.memory_logger.table=false"]
    )
    assert (config.precision, config.accumulate_grad_batches) == ("32-true", 4)
    assert callbacks(config)["memory_logger"].table is False


def test_add_and_remove_a_callback() -> None:
    assert list(callbacks(compose("bf16", ["+callback=throughput"]))) == ["throughput"]
    both = compose("bf16", ["+callback=[throughput,memory_logger]"])
    assert list(callbacks(both)) == ["throughput", "memory_logger"]
    added = compose("checkpointing", ["+callback=throughput"])
    assert list(callbacks(added)) == ["activation_checkpointing", "memory_logger", "throughput"]
    for gone in ("~callback.memory_logger", "callback.memory_logger=null"):
        assert list(callbacks(compose("checkpointing", [gone]))) == ["activation_checkpointing"]


def test_mapping_is_checked_like_a_name() -> None:
    config = compose({"precision": "bf16", "callback": {"memory_logger": {}}}, ["accumulate_grad_batches=2"])
    assert (config.precision, config.accumulate_grad_batches) == ("bf16-mixed", 2)
    assert lines_with(refused({"precison": "bf16"}), "precison='bf16': ", nearest("precision"))
    assert "every_n_stepz" in refused({"callback": {"memory_logger": {"every_n_stepz": 1}}})


def test_no_preset_is_refused_with_the_remedy() -> None:
    """The `cfg.solo` of a structured configuration whose field is `solo: Any = None`."""
    said = refused(OmegaConf.create({"solo": None}).solo)
    assert lines_with(said, "preset=None: ", "write `- solo: bf16`")
    assert said.endswith(f"there are {', '.join(PRESETS)}")


def test_callers_mapping_stays_as_it_was() -> None:
    given_ = {"precision": "bf16", "callback": {"memory_logger": {"table": True}}}
    compose(given_, ["callback.memory_logger.table=false"])
    assert given_ == {"precision": "bf16", "callback": {"memory_logger": {"table": True}}}


@pytest.fixture
def user_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "conf" / "solo"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    yield folder  # type: ignore[misc]
    monkeypatch.undo()


def test_mandatory_value_must_be_given(user_presets: Path) -> None:
    (user_presets / "open.yaml").write_text("precision: ???\n")
    assert "precision" in refused("open")
    assert "precision" in refused({"precision": "???"})


def test_saved_composition_may_leave_fields_to_the_trainer(tmp_path: Path) -> None:
    """An application's `.hydra/config.yaml` and a run's `config.yaml` have `???` for them."""
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        cfg = hydra_compose(overrides=["+solo=ddp", "solo.devices=2"])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    saved = OmegaConf.load(tmp_path / "config.yaml").solo
    assert OmegaConf.is_missing(saved, "precision")
    configuration = compose(saved)
    assert (configuration.precision, configuration.devices) == (None, 2)
    assert configuration.techniques == compose("ddp").techniques


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("precision: bf16\nprecision: fp16\n", "line 2"),
        ("callback:\n\tmemory_logger: {}\n", "line 2"),
        ("", "line 1"),
        ("- precision\n", "line 1"),
        ("precision: [bf16\n", "line 2"),
    ],
)
def test_ill_formed_file_is_refused_with_its_line(user_presets: Path, text: str, where: str) -> None:
    path = user_presets / "mine.yaml"
    path.write_text(text)
    message = refused("mine")
    assert str(path) in message
    assert where in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precison: bf16\n", [nearest("precision")]),
        ("precision: bf16\naccumulate_grad_batches: abc\n", ["accumulate_grad_batches", "'abc'"]),
        ("callback: {memory_logger: {every_n_stepz: 1}}\n", [nearest("every_n_steps")]),
        ("every_k: 2\n", ["callback.activation_checkpointing.every_k="]),
    ],
)
@pytest.mark.parametrize("schema", ["", "defaults:\n  - /solo/schema@_here_: solo\n  - _self_\n"])
def test_typo_in_a_file_is_named_with_and_without_the_schema(
    schema: str, text: str, words: list[str], user_presets: Path
) -> None:
    (user_presets / "mine.yaml").write_text(schema + text)
    message = refused("mine")
    assert [word for word in words if word not in message] == []
    assert "PresetSchema" not in message


def test_typo_in_a_defaults_list_is_named(user_presets: Path) -> None:
    text = "defaults:\n  - /solo/schema@_here_: solo\n  - callback: [memory_loger]\n  - _self_\n"
    (user_presets / "mine.yaml").write_text(text)
    message = refused("mine")
    assert nearest("memory_logger") in message
    assert "search path" not in message


def test_file_with_a_byte_order_mark_is_read(user_presets: Path) -> None:
    (user_presets / "mine.yaml").write_bytes(b"\xef\xbb\xbf# mine. Runs on: any device.\nprecision: bf16\n")
    assert compose("mine").precision == "bf16-mixed"
    assert describe(preset_files()["mine"]) == "mine. Runs on: any device."


@pytest.mark.parametrize("line", ["accumulate_grad_batches: yes", "accumulate_grad_batches: 12:30", "precision: yes"])
def test_yaml_booleans_are_refused_and_sexagesimal_numbers_read(user_presets: Path, line: str) -> None:
    (user_presets / "mine.yaml").write_text(f"precision: bf16\n{line}\n".replace("precision: bf16\npre", "pre"))
    if line.endswith("12:30"):  # YAML 1.1 reads 750 sexagesimal; documented in README, and shown by `show`
        assert compose("mine").accumulate_grad_batches == 750
    else:
        assert line.split(":")[0] in refused("mine")


def test_users_own_preset_is_picked_by_name(user_presets: Path) -> None:
    (user_presets / "mine.yaml").write_text(
        "# mine\ndefaults:\n  - callback: [memory_logger]\n  - _self_\nprecision: bf16\naccumulate_grad_batches: 2\n"
    )
    config = compose("mine", ["callback.memory_logger.every_n_steps=3"])
    assert (config.precision, config.accumulate_grad_batches) == ("bf16-mixed", 2)
    assert callbacks(config)["memory_logger"].every_n_steps == 3
    assert "mine" in solo.list_presets()
    assert solo.show("mine").startswith("# mine\n")


def test_users_own_preset_comes_before_ours(user_presets: Path) -> None:
    (user_presets / "bf16.yaml").write_text("# mine\nprecision: 64-true\n")
    assert compose("bf16").precision == "64-true"


def test_composing_inside_a_running_application_leaves_it_alone() -> None:
    folder = str(Path(__file__).parents[2] / "examples" / "hydra_app" / "conf")
    older = {"version_base": "1.2"} if VERSION_BASE else {}  # Hydra 1.4 knows its own only
    with initialize_config_dir(folder, **older):
        running = GlobalHydra.instance().hydra
        assert compose("bf16").precision == "bf16-mixed"
        refused("bf61")
        refused("bf16", "callback.x.y=1")
        assert GlobalHydra.instance().hydra is running
        cfg = hydra_compose("train", overrides=["solo=bf16"])
        assert compose(cfg.solo).precision == "bf16-mixed"
    assert GlobalHydra.instance().hydra is None


def test_show_prints_what_is_composed() -> None:
    text = solo.show("checkpointing", ["callback.memory_logger.every_n_steps=7"])
    assert text.startswith("# bf16 mixed precision")
    plain = OmegaConf.to_container(OmegaConf.create(text))
    assert plain["callback"]["memory_logger"]["every_n_steps"] == 7


def test_composing_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_solo as solo\n"
        "from lightning_solo.presets.compose import compose\n"
        "[compose(name) for name in solo.list_presets()]\n"
        "solo.show('checkpointing')\n"
        "try: solo.trainer_kwargs('bf16', ['callback.x.y=1'])\n"
        "except solo.PresetError: pass\n"
        "assert not {'torch', 'lightning', 'pytorch_lightning', 'deepspeed'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@settings(max_examples=25)  # 0.1 s each
@given(
    precision=st.sampled_from(sorted(PRECISIONS)),
    factor=st.none() | st.integers(1, 1000),
    every=st.integers(1, 10**6),
)
def test_composed_fields_compose_to_the_same_configuration(precision: str, factor: int | None, every: int) -> None:
    fields = {
        "precision": precision,
        "accumulate_grad_batches": factor,
        "callback": {"memory_logger": {"every_n_steps": every}},
    }
    once = compose(fields)
    again = compose(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(compose_yaml(fields)))))
    assert once == again


@given(st.text(min_size=1, max_size=20).filter(lambda name: name not in FIELDS))
def test_any_other_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(PresetError) as caught:
        compose({name: 1})
    assert name in str(caught.value) or repr(name)[1:-1] in str(caught.value)


@given(st.from_regex(r"[a-z_]{1,8}(\.[a-zA-Z_]{1,8}){0,3}", fullmatch=True).filter(lambda p: not p.startswith("mine")))
@pytest.mark.row(81)
def test_any_target_that_is_not_allowed_is_refused(path: str) -> None:
    with pytest.raises(PresetError):
        compose({"callback": {"x": {"_target_": path}}}, allow=["mine"])


def test_compose_yaml_is_plain() -> None:
    assert type(compose_yaml("checkpointing")["callback"]) is dict


class TestLists:
    """Several presets combined: the later one counts, and what contradicts is refused."""

    def test_fields_of_all_are_joined_and_the_later_one_counts(self) -> None:
        with pytest.warns(UserWarning, match=mentions("precision='bf16-true' of preset compact", "'bf16-mixed'")):
            config = compose(["checkpointing", "compact"])
        listed = ["activation_checkpointing", "memory_logger", "compact_states", "gradient_release"]
        assert (config.precision, config.strategy, list(callbacks(config))) == ("bf16-true", None, listed)
        assert config == compose("compact_checkpointing")

    def test_an_override_settles_what_two_set(self) -> None:
        overrides = ["precision=bf16-true", "callback.memory_logger.table=false"]
        config = compose(["compact", "checkpointing"], overrides)
        assert config.precision == "bf16-true"
        assert callbacks(config)["memory_logger"].table is False

    def test_two_owners_of_the_states_are_refused(self) -> None:
        with pytest.warns(UserWarning, match="precision"):
            assert "drop compact or zero_offload" in refused(["compact", "zero_offload"], error=ConflictError)

    def test_only_presets_whose_removal_helps_are_named(self) -> None:
        message = refused(["packing", "checkpointing", "length_bucketing"], error=ConflictError)
        assert "drop packing or length_bucketing" in message
        assert "or checkpointing" not in message

    @pytest.mark.parametrize(
        ("names", "error", "words"),
        [
            (["bf16", "fp16"], ConflictError, "drop bf16 or fp16"),
            (["bf16", "bf16"], PresetError, "'bf16'"),
            (["auto", "bf16"], PresetError, "write it alone"),
            (["checkpointing", "bf61"], PresetError, nearest("bf16")),
            ([], PresetError, "write names"),
            ([1], PresetError, "write names"),
        ],
    )
    def test_contradictions_are_refused(self, names: list[Any], error: type[Exception], words: str) -> None:
        assert words in refused(names, error=error)


UNUSABLE = [b"precision: [bf16\n", b"\xff\xfe\x00", b"precison: bf16\n"]


def write_mine(content: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "conf" / "solo").mkdir(parents=True)
    (folder / "conf" / "solo" / "mine.yaml").write_bytes(content)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("content", UNUSABLE)
def test_unusable_file_of_the_user_is_refused_by_name(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mine(content, tmp_path, monkeypatch)
    with pytest.raises(PresetError, match=r"mine|precison"):
        compose("mine")


@pytest.mark.parametrize("content", [*map(long, UNUSABLE[:2]), UNUSABLE[2]])
def test_unusable_file_of_the_user_is_left_out_of_all_presets(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mine(content, tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match=mentions("mine.yaml is left out")):
        configs = compose_all()
    assert "mine" not in configs
    assert {"bf16", "compact"} <= set(configs)


def test_override_that_does_not_apply_to_all_presets_is_refused() -> None:
    with pytest.raises(PresetError, match="precison"):
        compose_all(["precison=bf16-mixed"])


@pytest.mark.parametrize(
    "order", [["gradient_release", "accumulation_schedule"], ["accumulation_schedule", "gradient_release"]]
)
def test_reader_of_gradients_is_refused_beside_their_release_in_either_order(order: list[str]) -> None:
    weighted = "callback.accumulation_schedule.weight_by=tokens"
    with pytest.raises(ConflictError, match=mentions(*order, "gradients")):
        compose("baseline", [f"+callback=[{','.join(order)}]", weighted])
