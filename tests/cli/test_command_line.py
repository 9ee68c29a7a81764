"""What the command line refuses before torch is imported, and in which words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_solo.cli import _show_warning, command_line, doctor, main
from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import (
    check_command_line,
    check_config,
    check_run_name,
)
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.machine import Gpu
from lightning_solo.units import GiB
from tests.cli.commands import call
from tests.conftest import long
from tests.messages import lines_with, mentions, nearest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["solo=bf61"], ["solo=bf61", nearest("bf16"), "checkpointing"]),  # row 1
        (["solo.accumulat=4"], ["accumulat=4", nearest("accumulate_grad_batches")]),  # row 2
        (["+solo.accumulat=4"], ["accumulat=4", nearest("accumulate_grad_batches")]),  # row 3
        (["model.widht=4"], ["model.widht=4", nearest("width")]),  # row 2
        (["+model.widht=4"], ["model.widht=4", nearest("width")]),  # row 3
        (["solo.callback.throughput.every_n_steps=3"], ["callback.throughput.every_n_steps=3", "write +"]),
        (["+solo/callback=thoughput"], ["callback='thoughput'", nearest("throughput")]),
        (["+callback=memory_logger"], ["write +solo/callback=memory_logger"]),
        (["callback=[memory_logger]"], ["write +solo/callback=[memory_logger]"]),
        (["+typo=1"], ["typo", "trainer", "model", "data"]),  # row 3
        (["solo.accumulate_grad_batches=abc"], ["accumulate_grad_batches='abc'", "integer"]),  # row 4
        (["model.width=abc"], ["model.width='abc'", "integer"]),  # row 4
        (["optimizer.lr=abc"], ["optimizer.lr='abc'", "number"]),  # row 4
        (["solo.accumulate_grad_batches=4.7"], ["4.7", "integer"]),  # row 5
        (["solo.accumulate_grad_batches=0"], ["0", "at least 1"]),  # row 6
        (["solo.accumulate_grad_batches=-1"], ["-1", "at least 1"]),  # row 7
        (["model=custom"], ["model._target_"]),  # row 10
        (["seed=1", "seed=2"], ["'seed=1' and 'seed=2'"]),  # row 13
        (["trainer.precision=bf16-true"], ["the preset sets that", "solo.precision=bf16-true"]),
        (["data=custom", "data._target_=m.Data", "allow=[m]"], ["data.context", "write model.context=..."]),
        (["solo=checkpointing,compact"], ["-m", "'solo=[checkpointing,compact]'"]),
        (["devices=2"], ["write solo.devices=2"]),  # row 23
        (["solo=ddp", "trainer.devices=2"], ["write solo.devices=2"]),
        (["solo.precision=bf61"], ["precision='bf61'", "32-true"]),  # row 27
        (["-m", "+foo=1,2"], ["foo"]),  # row 30
        (["-m", "seed=range(1,1)"], ["seed=range(1,1)", "0 jobs"]),  # row 30
        (["-m", "seed=range(0,1000000)"], ["1,000,000 jobs", "hydra.launcher.max_jobs=1,000"]),  # row 30
        (["-m", "seed=range(0,200)", "model.width=range(1,200)"], ["39,800 jobs"]),  # row 30
        (["-m", "hydra/launcher=basic", "seed=range(0,10001)"], ["10,001 jobs", "10,000;"]),
        (["~trainer"], ["~trainer"]),
        (["~seed"], ["~seed"]),
        pytest.param(["run=../x"], ["run='../x'", "run=first"], id="row 84, case 1"),
        pytest.param(["run=-x"], ["run='-x'"], id="row 84, case 2"),
        (["root=/proc/nothing"], ["root=/proc/nothing"]),  # row 31
        (["root=../elsewhere"], ["root=../elsewhere", "upwards"]),  # row 31
        pytest.param(["root=s3://bucket/runs"], ["root=s3:", "local folder", "upload"], id="row 85, remote root"),
        pytest.param(
            ["+hydra.callbacks.x={_target_:logging.FileHandler,filename:x}"], ["hydra.callbacks"], id="row 81, case 3"
        ),
        pytest.param(["+hydra.callbacks.x=${model}"], ["hydra.callbacks"], id="row 81, case 4"),
        pytest.param(
            ["hydra.job_logging.handlers.file.class=os.system"],
            ["os.system", "logging.FileHandler"],
            id="row 82, case 5",
        ),
        pytest.param(["+hydra.job_logging.formatters.x={'()':os.system}"], ["os.system"], id="row 82, case 6"),
        *(
            pytest.param([f"hydra.{text}"], [f"hydra.{text.partition('=')[0]}"], id=f"row 82, {text}")
            for text in (
                "hydra_logging.handlers.console.class=os.system",
                "job_logging.handlers.console.stream=ext://antigravity.x",
                "job_logging.handlers.console.stream='${oc.env:NO_SUCH,ext}://antigravity.x'",
                "job_logging.handlers.console.stream='${oc.env:NO_SUCH}'",
                "job_logging.handlers.file.filename=/tmp/elsewhere.log",
                "job_logging.handlers.file.filename=${hydra.runtime.output_dir}/../../x.log",
                "job_logging.handlers.file.filename=${hydra.runtime.output_dir}/${root}",
                "job_logging=${trainer}",
            )
        ),
        *(
            pytest.param([f"{more}hydra.{text}"], [f"hydra.{text.partition('=')[0]}"], id=f"row 84, {text}")
            for more, text in (
                ("", "run.dir=/tmp/elsewhere"),
                ("", "sweep.dir=../../x"),
                ("", "sweep.subdir=../../x"),
                ("", "output_subdir=../../x"),
                ("", "job.name=../../x"),
                ("", "job.name=${run}/../../x"),
                ("+", "job.env_set.LD_PRELOAD=evil.so"),
            )
        ),
        pytest.param(["hydra.launcher.preload=[antigravity]"], ["allow=[antigravity]"], id="row 81, preload"),
        pytest.param(["hydra.launcher=${model}"], ["hydra.launcher", "${model}"], id="row 81, launcher"),
        pytest.param(["--config-name", "other"], ["--config-name", "experiment=<name>"], id="row 81, application"),
        pytest.param(
            ["model=custom", "model._target_=m.X", "+model.x='${oc.create:{a:b}}'", "allow=[m]"],
            ["oc.create"],
            id="row 81, case 7",
        ),
        (["-m", "model=glob(*)"], ["glob", "commas"]),
        pytest.param(["model=custom", "model._target_=os.system"], ["os.system", "allow=[os]"], id="row 81, case 8"),
        pytest.param(
            ["model=custom", "model._target_=os.system", "allow=[mine]"], ["os.system", " mine"], id="row 81, case 9"
        ),
        (["resume=autoo"], ["resume='autoo'", nearest("auto")]),
        (["model.width=1,2"], ["-m"]),
        (["optimizer.lr=interval(1,2)"], ["interval(1,2)", "-m"]),
        (["-m", "optimizer.lr=interval(1,2)"], ["interval(1,2)", "hydra/sweeper=solo_optuna"]),
        (["-m", "optimizer.lrr=interval(1,2)", "hydra/sweeper=solo_optuna"], [nearest("lr")]),
        (["-m", "hydra.sweeper._target_=os.system"], ["os.system"]),
        (["model=byte_gpt_tini"], [nearest("byte_gpt_tiny")]),
        (["precision=32-true"], ["solo.precision=32-true"]),
        (["nonsense"], ["'nonsense'", "key=value"]),
        (["compact"], ["'compact'", "solo=compact", "'solo=[compact,...]'"]),
        (["++solo.callback=throughput"], [" +callback=throughput"]),
        (["--experimental-rerun", "x.pickle"], ["--experimental-rerun"]),
        (["+trainer.max_stepz=1"], [nearest("max_steps")]),
        (["trainer.max_stepz=1"], [nearest("max_steps")]),
        (["trainer.gradient_clip_val=1"], ["write +trainer.gradient_clip_val=1"]),
        (["seed=abc"], ["seed='abc'", "integer"]),
        (["seed=1.5"], ["seed=1.5", "integer"]),
        (["seed=-1"], ["seed=-1", "from 0"]),
        (["-m", "seed=1,2", "hydra.launcher.timeout=3"], ["hydra.launcher.timeout=3", nearest("timeout_s")]),
        (
            ["+solo/callback=throughput", "solo.callback.throughput.every_n_steps=3", "trainer.accelerator=cpu"],
            ["trainer.accelerator=cpu", "+trainer.accelerator=cpu"],
        ),
        (["solo.callback.memory_logger.x=1", "solo=checkpointing"], ["memory_logger.x=1", "every_n_steps"]),
    ],
)
def test_refusal_names_the_option_the_value_and_the_remedy(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(PresetError, match=mentions(*words)):
        check_command_line(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["+trainer.devices=2"],
        ["solo.devices=2"],  # row 23
        ["+trainer.precision=64-true"],
        ["+trainer.callbacks=null"],
        ["solo=fp16", "+trainer.accelerator=cpu"],
        ["solo=[bf16,fp16]"],  # row 13
        ["model=custom", "model._target_=m.X", "optimizer=adamw", "allow=[m]"],
        ["model=custom", "model._target_=m.X", "optimizer.lr=1e-3", "allow=[m]"],
        ["solo=accumulation", "solo.accumulate_grad_batches=4"],
    ],
)
def test_two_settings_that_contradict_each_other(arguments: list[str]) -> None:
    with pytest.raises(ConflictError):
        check_command_line(arguments)


@pytest.mark.parametrize(
    ("arguments", "word", "works"),
    [
        (["solo=bf16", "+trainer.precision=32-true"], "write solo.precision=32-true", True),
        (["solo=compact", "+trainer.precision=32-true"], "drop trainer.precision; with", False),
        (["solo=zero_offload", "+trainer.accelerator=cpu"], "drop trainer.accelerator", True),
    ],
)
def test_only_a_possible_override_is_proposed(arguments: list[str], word: str, works: bool) -> None:
    with pytest.raises(ConflictError, match=mentions(word)) as caught:
        check_command_line(arguments)
    assert "solo.accelerator" not in str(caught.value)
    assert ("write solo.precision" in str(caught.value)) == (works and "precision" in word)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trainer.devices=2"], ["trainer.devices=2", "write devices=1", "['ddp', 'bf16']"]),
        (["solo=checkpointing", "trainer.devices=2"], ["write devices=1", "['ddp', 'checkpointing']"]),
        (["solo=checkpointing", "solo.devices=2"], ["write devices=1", "['ddp', 'checkpointing']"]),
        (["solo=compact", "trainer.precision=32-true"], ["trainer.precision=32-true: ", "master_bits=32"]),
    ],
)
def test_a_field_that_the_preset_refuses_is_refused_with_its_remedy(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConflictError, match=mentions(*words)):
        check_command_line(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["solo=checkpointing", "solo.callback.memory_logger.every_n_steps=3", "+solo/callback=throughput"],
        ["-m", "solo=bf16,checkpointing", "model.width=128,256", "seed=range(0,3)"],
        ["model=custom", "model._target_=mine.Net", "+model.depth=3", "allow=[mine]", "data=none", "optimizer=none"],
        ["+trainer.gradient_clip_val=1.0", "experiment=quick", "run=first", "resume=auto"],
        ["+trainer.precision=bf16", "optimizer=custom", "optimizer._target_=m.O", "+optimizer.lr=1", "allow=[m]"],
        ["-m", "seed=range(0,2000)", "hydra.launcher.max_jobs=2000"],
        ["-m", "seed=range(0,10000)", "hydra/launcher=basic"],
        ["model=custom", "model._target_=m.X", "~optimizer", "~data", "allow=[m]"],
        ["-m", "seed=range(0,1000000)", "optimizer.lr=tag(log,interval(1e-5,1e-2))", "hydra/sweeper=solo_optuna"],
        ["model=custom", "model._target_=m.X", "optimizer=sgd", "+model.optimizer=${optimizer}", "allow=[m]"],
    ],
)
def test_accepted(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "CHECKED_VALUES", 3)  # of a sweep's many values, each of which is composed
    check_command_line(arguments)


def test_a_model_of_ones_own_folder_brings_its_optimizer_unless_one_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "model/tiny": "_target_: m.X\n",
        "experiment/theirs": "# @package _global_\ndefaults:\n  - override /optimizer: sgd\n",
    }.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    own = ["model=tiny", "allow=[m]"]
    check_command_line(own)
    assert check_config(compose_application(own)).optimizer == {}
    check_command_line([*own, "+model.optimizer=${optimizer}", "optimizer.lr=1"])
    for chosen in ("optimizer.lr=1e-3", "experiment=theirs"):
        with pytest.raises(ConflictError, match=r"\+model.optimizer="):
            check_command_line([*own, chosen])


@pytest.mark.row(81)
def test_configuration_files_cannot_trust_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file could allow what it names; trust is given on the command line."""
    monkeypatch.chdir(tmp_path)
    experiment = tmp_path / "conf" / "experiment" / "theirs.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\nallow: [m]\nmodel: {_target_: m.X, name: null}\n")
    with pytest.raises(PresetError, match=mentions("allow=[m]", "command line")):
        check_command_line(["experiment=theirs"])
    with pytest.raises(PresetError, match=mentions("m.X")):
        check_command_line(["experiment=theirs", "allow=[mine]"])
    check_command_line(["experiment=theirs", "allow=[m]"])


def test_a_file_where_the_root_should_be_is_refused(tmp_path: Path) -> None:  # row 31
    (tmp_path / "runs").write_text("")
    with pytest.raises(PresetError, match="runs"):
        check_command_line([])


@pytest.mark.parametrize("name", ["a", "first-run_2.1", 7, "x" * 100])
def test_run_names(name: object) -> None:
    check_run_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\n", "a\0", "x" * 101, "-a", None, "ä"])
@pytest.mark.row(84)
def test_run_name_that_is_no_file_name_is_refused(name: object) -> None:
    with pytest.raises(PresetError, match="run="):
        check_run_name(name)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "solo=bf61"], 2, nearest("bf16")),
        (["trian"], 2, nearest("train")),
        (["show", "checkpoint"], 2, nearest("checkpointing")),
        (["show", "bf16", "precison=32"], 2, nearest("precision")),
        (["presets"], 0, "checkpointing"),
        (["show", "checkpointing"], 0, "activation_checkpointing:"),
        (["show", "bf16", "+solo/callback=throughput"], 0, "window_size: 100"),
        (["show", "+solo/callback=throughput"], 2, "show bf16 +solo/callback=throughput"),
        (["show", "throughput"], 0, "window_size: 100"),
        (["show", "activation_checkpointing", "callback.activation_checkpointing.every_k=2"], 0, "every_k: 2"),
        long(["doctor"], 0, "C++ compiler"),
        (["--help"], 0, "results"),
        (["--version"], 0, "0.2.0"),
    ],
)
def test_commands(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    output = call(tmp_path, *arguments, code=code)
    assert words in output
    assert "Traceback" not in output


@pytest.mark.parametrize("command", ["show", "presets", "doctor", "report"])
def test_help_of_a_command_without_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"lightning-solo {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["presets"], ["show", "layer_drop"]])
def test_marks_of_the_documentation_are_not_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    out = capsys.readouterr().out
    assert "of count blocks" in out
    assert "``" not in out


@pytest.mark.parametrize("content", [b"precision: [bf16\n", b"\xff\xfe\x00"])
def test_unreadable_preset_is_named(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "solo").mkdir(parents=True)
    (tmp_path / "conf" / "solo" / "mine.yaml").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PresetError, match=mentions("can't be read", "mine.yaml")):
        check_command_line(["solo=mine"])
    check_command_line(["solo=bf16"])
    assert "mine" in call(tmp_path, "presets")


def test_preset_file_that_is_a_folder_or_a_dangling_link_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf" / "solo" / "folder.yaml").mkdir(parents=True)
    (tmp_path / "conf" / "solo" / "dangling.yaml").symlink_to(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    listing = call(tmp_path, "presets")
    assert listing.count("can't be read") == 2
    assert "bf16" in listing


@pytest.mark.parametrize("words", ["compact", "[compact,checkpointing]"])
def test_the_chosen_presets_are_known_by_their_names(words: str) -> None:
    assert check_config(compose_application([f"solo={words}"])).solo.preset == words


@pytest.mark.parametrize(
    ("number", "text"), [(None, ""), (8902, "8.9.2"), (90100, "9.1.0"), (91002, "9.10.2"), (100304, "10.3.4")]
)
def test_doctor_prints_the_version_of_cudnn(number: int | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert doctor.cudnn_version() == text


def test_doctor_lists_gpus_and_what_the_variable_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Gpu("0", "H100", "GPU-a", 70 * GiB, 80 * GiB), Gpu("1", "A100", "GPU-b")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for present in ([], two[:1]):
        monkeypatch.setattr(doctor, "nvidia_gpus", lambda present=present: present)
        assert doctor.gpus() == {}
    monkeypatch.setattr(doctor, "nvidia_gpus", lambda: two)
    lines = {"GPU 0": "H100, GPU-a, 70.00 GiB free", "GPU 1": "A100, GPU-b"}
    assert doctor.gpus() == lines
    for variable, said in (("1", "1 of 2"), ("0,0", "twice"), ("", "hides all GPUs"), ("5", "none of")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert said in doctor.gpus()["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"])
@pytest.mark.row(86)
def test_doctor_names_folders_of_code_that_others_may_write_into(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    tmp_path.chmod(0o777)
    assert re.search(mentions(str(tmp_path), "go-w", f"{variable}=<"), doctor.unsafe()[f"unsafe: {variable}"])
    tmp_path.chmod(0o755)
    assert f"unsafe: {variable}" not in doctor.unsafe()


@pytest.mark.gpu
def test_doctor_describes_the_gpu() -> None:
    hardware = doctor.hardware()
    assert hardware["gpu"]
    assert hardware["cuDNN of torch"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zero_offload", "compact"], ["show '[zero_offload,compact]'"]),
        (["[]"], ["[compact,checkpointing]"]),
    ],
)
def test_show_refuses_other_forms_of_a_list(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", *arguments])
    assert ended.value.code == 2
    assert lines_with(capsys.readouterr().err, *words)


@pytest.mark.parametrize(
    ("file", "named"),
    [(contextlib.__file__, False), (command_line.__file__, False), (pytest.__file__, True), ("/home/me/net.py", True)],
)
def test_warning_names_only_the_files_of_others(file: str, named: bool, capsys: pytest.CaptureFixture[str]) -> None:
    _show_warning("text", UserWarning, file, 1)
    printed = capsys.readouterr().err
    assert printed.endswith("UserWarning: text\n")
    assert (file in printed) == named


@pytest.mark.parametrize(
    ("written", "read"), [("[5]", [5]), ("{embed_tokens:[5],lm_head:[6]}", {"embed_tokens": [5], "lm_head": [6]})]
)
def test_rows_of_tokens_are_a_list_or_a_mapping(written: str, read: object) -> None:
    cfg = compose_application(["solo=adapters", f"solo.callback.adapters.trainable_token_indices={written}"])
    settings = [part.settings for part in check_config(cfg).solo.techniques if part.card.name == "adapters"]
    assert [vars(each)["trainable_token_indices"] for each in settings] == [read]
