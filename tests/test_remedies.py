"""Every remedy that a message gives is followed: it leads to an accepted configuration, or to another question."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.cards.arguments import parameters_of
from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.engines import ENGINES
from lightning_solo.cli import COMMANDS
from lightning_solo.cli.command_line import check_command_line
from lightning_solo.errors import SoloError
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.overrides import parse_override
from lightning_solo.presets.parse import PRECISIONS
from lightning_solo.presets.spelling import on_command_line
from tests.contract.runs import fields
from tests.messages import nearest
from tests.pages import TABLES
from tests.remedies import GAP, MESSAGES, OVERRIDE, PACKAGE, advice, templates

CARDS = built_in_cards()
TEMPLATES = sorted(set(templates()))


# --- every override in every message of the package ---

SETTINGS = {
    "callback.activation_offloading.folder": {"mode": "disk"},
    "callback.compact_states.state_budget": {},
    "callback.distillation.part": {"teacher": "start"},
    "callback.distillation.streamed": {"teacher": "start"},
}
"""Setting -> the other settings with which its messages are raised."""


EXAMPLES = {"precision": "32-true", "callback": "throughput", "auto.budget": "2GiB"}


def example(name: str, setting: str) -> str:
    """Return a value that a setting accepts, in place of the one that a reader fills in."""
    parameter = parameters_of(CARDS[name].settings)[setting]
    values = [*parameter.allowed, parameter.default, 2, 0.5, "1GiB", ["Name"], "name"]
    value = next(value for value in values if value not in (None, ()) and parameter.complaint(value) is None)
    return str(list(map(list, value)) if setting == "milestones" else value)


def accepts(override: str) -> None:
    """Compose a preset with an override of a message, whose gaps are filled in."""
    match = OVERRIDE.fullmatch(override)
    assert match is not None
    marks, key, value = match["marks"], match["key"], match["value"]
    group, _, rest = key.partition(".")
    name, _, setting = rest.partition(".")
    preset: dict[str, Any] = {"precision": "bf16-mixed", "callback": {}}
    if group == "strategy":
        owners = [each for each in ("zero_offload", "ddp", "fsdp", "zero3") if not name or name in CARDS[each].defaults]
        stage = {"stage": 3} if owners[0] == "zero_offload" else {}
        preset["strategy"], setting, name = {"name": owners[0], **stage}, name, owners[0]
    if "activation_offloading" in override:  # which moves the inputs of recomputed blocks
        preset["callback"] = {"activation_checkpointing": {}}
    if group == "callback" and name and not marks.startswith("+"):
        preset["callback"] |= {name: SETTINGS.get(key, {})}
    if value and re.search(r"<|\{[^}]|\0", value):
        value = example(name, setting) if setting else EXAMPLES.get(key, "2")
    if setting and value is None and "~" not in marks:  # a setting that is named without a value
        assert setting in CARDS[name].defaults
        return
    if "~" in marks or value is not None:
        override = f"{marks}{key}" + ("" if value is None else f"={value}")
        compose("auto" if group == "auto" else preset, [override])


OVERRIDES = sorted({match[0] for _, text in TEMPLATES for match in OVERRIDE.finditer(advice(text))})


@pytest.mark.parametrize("override", [text for text in OVERRIDES if "solo" not in text and text not in SETTINGS])
def test_override_of_a_message_is_accepted(override: str) -> None:
    accepts(override.rstrip("'."))


# --- messages of compositions ---

Row = tuple[Any, list[str]]
"""A preset and overrides that are refused."""


def refusal(preset: Any, overrides: Sequence[str]) -> str | None:
    try:
        compose(preset, overrides, allow=("mine",))
    except SoloError as error:
        return str(error)
    return None


def remedies(message: str) -> list[list[str]]:
    """Return the alternatives that a message offers, each a list of overrides that are written together."""
    told = "\n".join(advice(line) for line in message.splitlines() if advice(line) != line)
    groups, end = [], 0
    for match in OVERRIDE.finditer(told):
        if match["value"] is None and "~" not in match["marks"]:
            continue
        override = match[0].rstrip("'\"].") if match[0].count("[") < match[0].count("]") else match[0].rstrip("'\".")
        if groups and told[end : match.start()] in (" ", " and "):
            groups[-1].append(override)
        else:
            groups.append([override])
        end = match.end()
    return groups


def applied(overrides: Sequence[str], remedy: Sequence[str], message: str) -> list[str]:
    """Return overrides with those of a remedy, which replace the one that is refused and others of the same option."""
    kept = [text for text in overrides if not message.lstrip("'+~").startswith(re.sub(r"=.*", "", text).lstrip("+~"))]
    for new in remedy:
        option = re.sub(r"=.*", "", new).lstrip("+~")
        same = [text for text in kept if re.sub(r"=.*", "", text).lstrip("+~") == option and option != "callback"]
        if new.startswith("~"):
            chosen = f"callback={option.partition('.')[2]}"
            same += [text for text in kept if text.lstrip("+").startswith((f"{option}.", chosen))]
        kept = [text for text in kept if text not in same]
        if not (new.startswith("~") and same):
            kept.append(re.sub(r"<[^>]*>", "2", new))
    return kept


def card_rows() -> list[Row]:
    """Return each technique under each precision and factor, and each pair of techniques."""
    names = dict.fromkeys(PRECISIONS.values())
    rows: list[Row] = [(fields(card, precision=name), []) for card in CARDS.values() for name in names]
    rows += [({**fields(card), "accumulate_grad_batches": 4}, []) for card in CARDS.values()]
    return rows + [(fields(one, other), []) for one, other in combinations(CARDS.values(), 2)]


MISTAKES: list[Row] = [
    ("bf16", ["+solo/callback=throughput"]),
    ("bf16", ["solo/callback=throughput"]),
    ("checkpointing", ["~solo.callback.memory_logger"]),
    ("bf16", ["solo.precision=32-true"]),
    ("checkpointing", ["every_k=2"]),
    ("bf16", ["every_k=2"]),
    ("zero_offload", ["stage=3"]),
    ("checkpointing", ["callback=throughput"]),
    ("checkpointing", ["~callback=memory_logger"]),
    ("bf16", ["+callback=throughput", "+callback=[leak_finder]"]),
    ("checkpointing", ["+callback.activation_checkpointing.every_k=2"]),
    ("checkpointing", ["+callback.again={name:memory_logger}"]),
    ("accumulation", ["accumulate_grad_batches=4"]),
    ("auto", ["auto.presets=3"]),
    ("auto", ["auto.accept_tight=3"]),
    ("zero_offload", ["precision=64-true"]),
    ("zero_offload", ["+strategy.offload_parameters=true"]),
    ("offloading", ["callback.activation_offloading.folder=/tmp"]),
    (
        "checkpointing",
        ["callback.activation_checkpointing.keep=products", "callback.activation_checkpointing.budget=0.5"],
    ),
    (
        "accumulation",
        ["callback.accumulation_schedule.by=noise_scale", "callback.accumulation_schedule.milestones=[[0,1]]"],
    ),
    ("compact", ["callback.compact_states.back_end=bitsandbytes_8bit", "callback.compact_states.master_bits=32"]),
    ("compact", ["precision=16-mixed"]),
    ("gradient_release", ["precision=16-mixed"]),
    ("compact", ["+strategy.master_bits=32"]),
    ("compact", ["+strategy.gradient_buffer=host"]),
    ("bf16", ["strategy=compact"]),
    ("bf16", ["strategy=zero_offload"]),
]


@functools.cache
def messages() -> list[tuple[Any, list[str], str]]:
    """Return the rows that are refused, with their messages."""
    rows = [*MISTAKES, *card_rows()]
    return [(preset, overrides, text) for preset, overrides in rows if (text := refusal(preset, overrides))]


def test_every_mistake_is_refused_with_a_remedy() -> None:
    refused = [(preset, overrides) for preset, overrides, _ in messages()]
    assert [row for row in MISTAKES if row not in refused] == []
    assert [text for _, _, text in messages() if not remedies(text) or "write write" in text] == []


def refused_after(preset: Any, overrides: Sequence[str], message: str, questions: int = 2) -> str | None:
    """Follow each remedy of a message, and those of further questions; return a message that offers none that works."""
    for remedy in remedies(message):
        dropped = re.findall(r"and drop (\w+)", advice(message))  # by the override ~field if the preset has it
        kept = [each for each in overrides if each.split("=")[0] not in dropped]
        kept += [f"~{name}" for name in dropped if kept == overrides]
        new = applied(kept, remedy, message)
        again = refusal(preset, new)
        refuses_remedy = again is not None and again.startswith(repr(remedy[0])) and "callbacks are none" not in again
        if again is not None and (questions == 0 or again == message or refuses_remedy or not remedies(again)):
            return f"{overrides}: {message}\n  {remedy}: {again}"
        if again is not None and (last := refused_after(preset, new, again, questions - 1)):
            return last
    return None


def test_remedies_of_refused_configurations_work() -> None:
    assert list(filter(None, (refused_after(*row) for row in messages()))) == []


COMBINED = [
    ("ddp stream", ["compact_states", "weights_on_host"], 2),
    ("zero3 compact", ["compact_states", "gradient_release"], 2),
    ("ddp compact", ["gradient_release"], 1),
]
"""Presets that can't be combined, the techniques of the second that are refused, and how many overrides it takes."""


@pytest.mark.parametrize(("text", "refused", "count"), COMBINED, ids=[text for text, *_ in COMBINED])
def test_all_conflicts_of_combined_presets_come_at_once_with_what_solves_them(
    text: str, refused: list[str], count: int
) -> None:
    names = text.split()
    message = refusal(names, []) or ""
    parts = [f"callback.{name}" for name in refused]
    assert re.findall(r"(\S+) and strategy=\w+ can't be combined", message) == parts
    assert f"presets {names[0]} and {names[1]} ({', '.join(parts)})" in message
    solution = message.splitlines()[-1]
    assert solution.startswith("for all of it") == (count > 1)
    written = remedies(solution)[0]
    assert len(written) == count
    assert refusal(names, written) is None
    dropped = solution.rpartition("drop ")[2].split(" or ")
    assert set(dropped) == set(names[:2])
    for name in dropped:
        assert refusal([each for each in names if each != name], []) is None


@pytest.mark.parametrize("name", [name for name in preset_files() if name not in ENGINES])
def test_a_preset_for_one_device_names_an_accepted_combination(name: str) -> None:
    example = re.search(r"such as (\[.*\])$", compose(name).one_device("devices=2"))
    assert example is not None
    assert compose(ast.literal_eval(example[1])).engine == "ddp"


def test_a_single_preset_names_all_conflicts_and_the_command_line_its_presets() -> None:
    with pytest.raises(SoloError) as caught:
        check_command_line(["solo=[ddp,stream]", "solo.precision=32-true"])
    message = on_command_line(str(caught.value))
    assert message.count("can't be combined") == 2
    assert "solo.callback.compact_states.master_bits=24 and solo.precision=32-true" in message
    (overrides,) = remedies(message.splitlines()[-1])
    assert len(overrides) == 3
    check_command_line(["solo=[ddp,stream]", *overrides])  # without the precision, which one of them replaces
    with pytest.raises(SoloError, match=re.escape("presets ddp and stream (callback.compact_states, ")):
        check_command_line(["solo=[ddp,stream]"])


@pytest.mark.parametrize("name", ["throughput", "leak_finder"])
def test_technique_in_place_of_a_preset_is_added_by_the_override(name: str) -> None:
    ((override,),) = remedies(refusal(name, []) or "")
    assert refusal("bf16", [override]) is None
    assert compose("bf16", [override]).has(name)


# --- values of settings ---


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_values_that_a_setting_offers_are_accepted(card: Card) -> None:
    for name, parameter in parameters_of(card.settings).items():
        for wrong in ({1, 2}, "none of these", -1):
            complaint = parameter.complaint(wrong) or ""
            if complaint.startswith("write "):
                for value in re.findall(r"'[^']+'|\[[^\]<]+\]", complaint):
                    plain = value.strip("'") if value[0] == "'" else parse_override(f"x={value}").value()
                    assert parameter.complaint(plain) is None, (card.name, name, complaint)


# --- the command line ---

COMMANDS_REFUSED: list[tuple[list[str], str, list[str]]] = [
    (["callback=throughput"], "+solo/callback=throughput", ["+solo/callback=throughput"]),
    (["precision=32-true"], "solo.precision=32-true", ["solo.precision=32-true"]),
    (["solo=bf16", "trainer.precision=32-true"], "solo.precision=32-true", ["solo=bf16", "solo.precision=32-true"]),
    (["trainer.precison=32-true"], nearest("precision"), []),
    (["trainer.gradient_clip_val=1"], "+trainer.gradient_clip_val=1", ["+trainer.gradient_clip_val=1"]),
    (["model.widht=8"], nearest("width"), []),
    (["solo=bf16,fp16"], "-m", ["-m", "solo=bf16,fp16"]),
    (["solo=checkpointing,prefetch"], "'solo=[checkpointing,prefetch]'", ["solo=[checkpointing,prefetch]"]),
    (["root=../x"], "an absolute path", ["root=/tmp/x"]),
    (["~root"], "drop that", []),
    (["run=a/b"], "run=first", ["run=first"]),
    (["-m", "optimizer.lr=interval(1e-5,1e-2)"], "hydra/sweeper=solo_optuna", []),
    (["-m", "solo=glob(*)"], "separated by commas", ["-m", "solo=bf16,fp16"]),
    (["-m", "seed=range(1,1)"], "seed=range(1,5)", ["-m", "seed=range(1,5)"]),
    (["resume=atuo"], "'auto'", ["resume=auto"]),
    (["solo=zero_offload", "~solo.strategy"], "solo.strategy=null", ["solo=zero_offload", "solo.strategy=null"]),
    (["+trainer.callbacks=[]"], "'+solo.callback.mine={_target_: my_project.MyCallback}'", []),
    (["solo.every_k=2"], "solo.callback.activation_checkpointing.every_k=2", []),
    (
        ["+solo/callback=throughput", "+solo/callback=leak_finder"],
        "write +solo/callback=[throughput,leak_finder]",
        ["+solo/callback=[throughput,leak_finder]"],
    ),
]


@pytest.mark.parametrize(("refused", "remedy", "instead"), COMMANDS_REFUSED)
def test_remedies_of_refused_commands_work(
    refused: list[str], remedy: str, instead: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SoloError) as caught:
        check_command_line(refused)
    assert remedy in on_command_line(str(caught.value))
    check_command_line(instead)


# --- the whole package ---


def pattern(template: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, template.split(GAP))), re.DOTALL)


@functools.cache
def said() -> list[str]:
    """Return the messages of the tables above."""
    texts = [text for _, _, text in messages()]
    for command, _, _ in COMMANDS_REFUSED:
        with pytest.raises(SoloError) as caught:
            check_command_line(command)
        texts.append(str(caught.value))
    return texts


def is_followed(template: str) -> bool:
    """Return whether a test above follows a remedy of a template."""
    if any(match["value"] or "~" in match["marks"] for match in OVERRIDE.finditer(advice(template))):
        return True
    return len(template.replace(GAP, "")) > 8 and any(pattern(template).search(text) for text in said())


ELSEWHERE: dict[str, dict[str, int]] = {
    "in Python code": {
        "attach.py": 5,
        "cards/catalogue.py": 11,
        "data/item_states.py": 2,
        "data/length_batches.py": 3,
        "data/loaders.py": 3,
        "data/replayed_loaders.py": 1,
        "data/splitting.py": 3,
        "data/tokenizers.py": 3,
        "data/tokens.py": 1,
        "data/truncation.py": 1,
        "errors.py": 1,
        "export/adapter_files.py": 1,
        "export/adapter_folder.py": 2,
        "export/conversion.py": 2,
        "export/generation_files.py": 1,
        "export/graphs.py": 17,
        "export/pretrained.py": 10,
        "export/pruned_config.py": 1,
        "export/soft_labels.py": 5,
        "export/sources.py": 5,
        "export/teachers.py": 3,
        "export/trained_models.py": 10,
        "export/trained_weights.py": 1,
        "export/weights.py": 5,
        "export/quantized.py": 6,
        "fine_tuning/auto_model.py": 2,
        "fine_tuning/causal_lm.py": 1,
        "fine_tuning/chat.py": 2,
        "fine_tuning/conversations.py": 11,
        "fine_tuning/data_report.py": 4,
        "fine_tuning/from_folder.py": 7,
        "fine_tuning/labelled.py": 2,
        "fine_tuning/loading.py": 7,
        "fine_tuning/mapped_rows.py": 5,
        "fine_tuning/messages.py": 9,
        "fine_tuning/rows.py": 7,
        "fine_tuning/text.py": 2,
        "fine_tuning/trained.py": 2,
        "lightning_cli.py": 1,
        "memory/block_ring.py": 1,
        "nn/adaptation.py": 1,
        "nn/adapter_merging.py": 1,
        "nn/adapter_targets.py": 4,
        "nn/block_sparse.py": 3,
        "nn/cross_entropy.py": 7,
        "nn/layer_drop.py": 1,
        "nn/host_weights.py": 1,
        "nn/quantized_loading.py": 9,
        "nn/saved_tensors.py": 1,
        "nn/sliding_window.py": 2,
        "optim/adamw_update.py": 2,
        "optim/back_ends.py": 2,
        "optim/compact_adamw.py": 1,
        "optim/compressed_moments.py": 1,
        "optim/conversion.py": 1,
        "optim/gradient_checks.py": 1,
        "nn/fake_quantization.py": 3,
        "optim/gradient_release.py": 4,
        "optim/master_weights.py": 2,
        "optim/split_optimizer.py": 3,
        "optim/torch_optimizers.py": 1,
        "nn/sharding.py": 3,
        "planner/batches.py": 1,
        "planner/preset_plans.py": 3,
        "planner/traces.py": 4,
        "prediction/files.py": 2,
        "prediction/streaming.py": 7,
        "presets/old_spellings.py": 2,
        "seams/patches.py": 1,
        "seams/released_gradients.py": 5,
        "seams/run.py": 3,
        "seams/same_modules.py": 1,
        "techniques/accumulation_schedule/technique.py": 3,
        "techniques/adapters/card.py": 1,
        "techniques/adapters/checkpoints.py": 1,
        "techniques/adapters/technique.py": 5,
        "techniques/compact_states/technique.py": 1,
        "techniques/distillation/projections.py": 2,
        "techniques/layer_freezing/card.py": 2,
        "techniques/layer_freezing/technique.py": 2,
        "techniques/micro_batching/gradient_caching.py": 4,
        "techniques/prefetch/technique.py": 1,
        "techniques/fsdp/technique.py": 2,
        "cards/configuration.py": 1,
        "cards/engines.py": 3,
        "guard.py": 1,
        "zero/config.py": 8,
        "zero/flat.py": 5,
        "zero/host_optimizer.py": 4,
        "zero/process.py": 3,
        "zero/refusals.py": 6,
    },
    "on the command line, in shells and files": {
        "checkpoint/manifest.py": 1,
        "cli/__init__.py": 2,
        "cli/command_line.py": 6,
        "cli/convert.py": 1,
        "cli/export.py": 3,
        "cli/export_graph.py": 1,
        "cli/generate.py": 1,
        "cli/hydra_section.py": 4,
        "cli/ladder_line.py": 1,
        "cli/plan.py": 1,
        "cli/plan_largest.py": 3,
        "cli/plan_display.py": 1,
        "cli/plan_line.py": 7,
        "cli/predict.py": 1,
        "cli/presets.py": 1,
        "cli/report.py": 3,
        "cli/results.py": 1,
        "cli/run_folder.py": 5,
        "cli/show.py": 1,
        "cli/soft_labels.py": 3,
        "cli/train.py": 6,
        "cli/quantized_run.py": 2,
        "cli/trained_run.py": 5,
        "cpp_builds.py": 1,
        "data/soft_labels.py": 5,
        "ladder/figures.py": 2,
        "machine.py": 3,
        "nn/factorizing.py": 6,
        "cards/factors.py": 2,
        "nn/features.py": 5,
        "export/factorized.py": 1,
        "nn/sharing.py": 2,
        "nn/teacher.py": 1,
        "techniques/activation_checkpointing/technique.py": 1,
        "techniques/weight_averaging/card.py": 1,
        "seams/factors.py": 2,
        "export/few_bits.py": 3,
        "memory/segments.py": 1,
        "optim/adamw_state_dict.py": 1,
        "optim/cpu_kernel.py": 1,
        "planner/auto.py": 1,
        "planner/calibrate.py": 1,
        "planner/calibration.py": 4,
        "report/charts.py": 1,
        "report/page.py": 2,
        "report/write.py": 1,
        "requirements.py": 2,
        "sweeps/gpus.py": 8,
        "sweeps/jobs.py": 6,
        "sweeps/launch.py": 2,
        "sweeps/search.py": 4,
        "sweeps/search_settings.py": 2,
        "sweeps/search_space.py": 2,
        "sweeps/study.py": 1,
        "sweeps/sweep.py": 1,
        "techniques/finite_guard/card.py": 2,
        "techniques/finite_guard/technique.py": 6,
        "techniques/fused_kernels/technique.py": 1,
        "zero/extension.py": 3,
    },
    "a value of the reader, for the option that the message names": {
        "export/pruned.py": 1,
        "export/pruned_config.py": 1,
        "cards/arguments.py": 2,
        "cards/lengths.py": 1,
        "cards/settings.py": 2,
        "data/item_lengths.py": 1,
        "data/loss_weights.py": 3,
        "data/packing.py": 2,
        "nn/attention_kernels.py": 1,
        "nn/blocks.py": 1,
        "nn/quantizable.py": 1,
        "nn/recomputation.py": 1,
        "optim/averages.py": 1,
        "optim/muon.py": 1,
        "optim/one_by_one.py": 3,
        "optim/schedule_free.py": 1,
        "optim/state_placement.py": 1,
        "planner/bases.py": 1,
        "presets/compose.py": 9,
        "presets/devices.py": 3,
        "presets/files.py": 2,
        "presets/overrides.py": 2,
        "presets/parse.py": 6,
        "techniques/activation_checkpointing/budget.py": 1,
        "techniques/activation_checkpointing/card.py": 4,
        "techniques/allocator/technique.py": 1,
        "techniques/chunked_cross_entropy/card.py": 1,
        "techniques/compact_states/states.py": 1,
        "techniques/curriculum/card.py": 2,
        "techniques/curriculum/technique.py": 4,
        "techniques/distillation/card.py": 3,
        "techniques/distillation/technique.py": 4,
        "techniques/fused_kernels/card.py": 1,
        "techniques/gradient_norm/card.py": 1,
        "techniques/gradient_release/card.py": 1,
        "techniques/gradient_norm/technique.py": 1,
        "techniques/low_precision_matmul/technique.py": 1,
        "techniques/micro_batching/card.py": 3,
        "techniques/micro_batching/global_batch.py": 1,
        "techniques/quantized_base/technique.py": 1,
        "techniques/micro_batching/technique.py": 3,
        "techniques/optimizer_replacement/card.py": 5,
        "techniques/optimizer_replacement/technique.py": 3,
        "techniques/pruning/card.py": 3,
        "techniques/pruning/technique.py": 3,
        "techniques/safe_checkpoint/card.py": 1,
        "techniques/throughput/card.py": 1,
        "techniques/zero_offload/card.py": 2,
        "units.py": 1,
    },
}
"""Reason why a remedy is no override that can be composed here -> file -> number of such messages."""


def test_every_remedy_is_followed_or_has_a_reason() -> None:
    """Who adds a message follows its remedy above, or counts it here and follows it in the tests of its file."""
    left = Counter(file for file, template in TEMPLATES if not is_followed(template))
    assert dict(left) == {file: count for files in ELSEWHERE.values() for file, count in files.items()}


def test_commands_of_messages_exist() -> None:
    texts = [text for _, text in TEMPLATES if not re.search(r"lightning-solo (needs|trains)", text)]
    named = {match for text in texts for match in re.findall(r"lightning-solo (\w+(?:-\w+)*)((?: --[\w-]+)*)", text)}
    assert {"plan", "export", "report"} <= {name for name, _ in named} <= set(COMMANDS)
    for name, flags in named:
        source = "".join(
            path.read_text(encoding="utf-8") for path in (PACKAGE / "cli").glob(f"{name.replace('-', '_')}*.py")
        )
        assert all(f'"{flag}"' in source for flag in flags.split()), name


# --- the errors page ---


def test_index_of_the_errors_page_has_the_messages() -> None:
    rows = [(pattern(first.removesuffix(" …").replace("…", GAP)), name) for first, name, _ in MESSAGES.index()]
    assert [message for message in said() if not any(words.match(message) for words, _ in rows)] == []
    page = (PACKAGE.parent / "docs" / "errors.md").read_text(encoding="utf-8")
    assert {name for _, name in rows} <= set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert "| [GradientError](#gradienterror) |" in TABLES.messages(MESSAGES.index())
