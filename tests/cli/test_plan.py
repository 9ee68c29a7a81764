"""`lightning-solo plan` as a user would call it: table, JSON, picture, a module of somebody else's, Ctrl-C, typos."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from lightning_solo.cli import main
from lightning_solo.cli.application import compose_application
from lightning_solo.cli.plan import NEEDED, notes
from lightning_solo.cli.plan_display import assumptions, bars, what_to_write
from lightning_solo.cli.plan_largest import Setting, conclusion, largest, line, setting_of
from lightning_solo.cli.plan_line import compose, parse
from lightning_solo.cli.train import planned_bytes
from lightning_solo.errors import PlanError, PresetError, SoloError
from lightning_solo.planner import calibrate
from lightning_solo.planner.calibration import Readings, calibrated
from lightning_solo.planner.device import device
from lightning_solo.planner.plan import HOST_NOT_JUDGED, Plan
from lightning_solo.planner.preset_plans import plan
from lightning_solo.planner.table import table
from lightning_solo.planner.worker import WORKER, PlanRequest
from lightning_solo.presets.compose import compose as composed
from lightning_solo.presets.writing import fields_of
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.report.palette import DARK, LIGHT
from lightning_solo.report.plan_chart import parts, picture
from lightning_solo.units import GiB
from tests.cli.commands import command, environment
from tests.messages import lines_with, mentions, nearest

PROJECT = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Theirs(L.LightningModule):
    def __init__(self, width=64, batch_size=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def train_dataloader(self):
        print("not JSON")
        x = torch.zeros(80, 16)
        return DataLoader(TensorDataset(x, x[:, :1]), batch_size=self.hparams.batch_size)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""
THEIRS = ["model=custom", "model._target_=their_project.Theirs", "allow=[their_project]"]
CARD = ["--device", "rtx-4090"]
# the command in a process that says at its end which of the heavy packages it has imported
WATCHED = """
import sys
from lightning_solo.cli import main
try:
    main(sys.argv[1:])
finally:
    print("imported:", *sorted({"torch", "lightning", "altair"} & set(sys.modules)), file=sys.stderr)
"""
SAMPLE = Plan(
    preset="bf16",
    device="rtx_4090",
    micro_batch=16,
    peak_bytes=10 * GiB,
    breakdown={"weights": 4 * GiB, "gradients": 0, "activations": 5 * GiB, "workspace": GiB // 2, "rounding": GiB // 2},
    phases={"forward": 10 * GiB, "backward": 9 * GiB},
    needed_bytes=12 * GiB,
    reserved_bytes=13 * GiB,
    budget_bytes=16 * GiB,
    verdict="fits",
    host_bytes=0,
    seconds_per_step=0.5,
    flops=1,
    bytes_moved=1,
    largest_micro_batch=20,
    assumptions=("a", "b"),
)


def called(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
    printed = capsys.readouterr()
    assert ended.value.code == code, printed.err
    return printed.out, printed.err


# --- the command ---


@pytest.mark.long
def test_a_module_of_somebody_elses_without_torch_in_the_command(tmp_path: Path) -> None:
    (tmp_path / "their_project.py").write_text(PROJECT)
    asked = [
        *THEIRS,
        "+model.batch_size=4",
        *CARD,
        "--presets",
        "bf16,checkpointing",
        "--json",
        "--picture",
        "new/p.png",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, "plan", *asked],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # and nothing else: the module prints too
    (only,) = found["plans"]
    assert (only["preset"], only["micro_batch"], only["device"]) == ("bf16", 4, "rtx_4090")
    # fp32: 16 * 64 + 64 + 64 + 1 = 1153 weights, AdamW's states twice that and its 4 counters of steps
    assert only["breakdown"]["weights"] == 4 * 1153
    assert only["breakdown"]["optimizer_states"] == 8 * 1153 + 4 * 4
    assert "Theirs" in found["not_planned"]["checkpointing"]
    assert found["command"] == shlex.join(["lightning-solo", "plan", *asked])
    assert shlex.join(["lightning-solo", "train", *asked[:4], "solo=bf16"]) in found["advice"]
    assert done.stderr.splitlines()[-1] == "imported: altair"
    with Image.open(tmp_path / "new" / "p.png") as png:
        assert png.width >= 1600
        assert len(png.convert("RGB").getcolors(2**20) or []) > 3


@pytest.mark.long
def test_json_is_the_planners_answer(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = called(capsys, *CARD, "--presets", "zero_offload,bf16", "--micro-batch", "8", "--budget", "1GiB", "--json")
    rows = json.loads(out)["plans"]
    assert all({field.name for field in fields(Plan)} <= set(row) for row in rows)
    read = [Plan.from_dict(row) for row in rows]
    module = lambda: ByteGPT(width=128, depth=4, heads=4, context=128)  # noqa: E731 - as the command line has it
    batch = torch.zeros(16, 129, dtype=torch.uint8)
    told = plan(module, batch, presets=["zero_offload", "bf16"], device="rtx_4090", budget="1GiB", micro_batch=8)
    assert read == told
    assert [row["fits"] for row in rows] == [one.fits for one in told] == [True, True]


def test_the_table_its_bars_and_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["model.depth=2", *CARD, "--presets", "bf16,fp16", "--budget", "700MiB"]
    out, err = called(capsys, *asked)
    printed = out.splitlines()
    assert lines_with(printed[0], "rtx_4090", "700.00 MiB", "batches of 16")
    assert printed[2].split() == ["preset", "verdict", "peak", "needed", "step", "batch", "peak", "in"]
    assert re.fullmatch(r"bf16 +fits +\d+\.\d\d MiB +\d{3}\.00 MiB +1\.00 x +\d+ forward *", printed[3])
    assert re.fullmatch(r"bf16 +[WGOA]+[WGOATX]*-+ *\| +\d{3}\.00 MiB", printed[6])
    assert "  A activations  " in printed[8]
    assert lines_with(out, "assumed: ", "16-mixed", "bf16-mixed", "(fp16)")
    assert len(lines_with(out, "assumed: ", "CUDA context")) == 1
    assert printed[-1].endswith(": lightning-solo train model.depth=2 solo=bf16")
    assert re.match(r"bf16: fits, \d+\.\d\d MiB\nfp16: fits, ", err)


@pytest.mark.parametrize(("width", "last"), [(80, "batch"), (92, "batch"), (120, "in")])
def test_each_preset_is_one_line_on_a_terminal(width: int, last: str) -> None:
    names = ["compact_host_checkpointing", "bf16"]
    plans = [replace(SAMPLE, preset=name, host_bytes=1000 * GiB, largest_micro_batch=10**6) for name in names]
    printed = io.StringIO()
    Console(width=width, file=printed).print(
        table([*plans, replace(plans[0], preset="c", verdict="does not fit")], plans[0], width)
    )
    lines = printed.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *names, "c"]
    assert lines[0].split()[-1] == last
    assert ("peak" in lines[0]) == (width > 80)
    assert all(f"{plans[0].needed_bytes / GiB:.2f} GiB" in line for line in lines[1:])


@pytest.mark.long
def test_none_fits_names_the_nearest_and_a_smaller_batch(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = called(capsys, *CARD, "data.batch_size=64", "solo=bf16", "--budget", "550MiB", code=1)
    said = re.search(r"550.00 MiB.*bf16,.* (\S+) MiB, (\S+) MiB more", out)
    assert said is not None
    assert float(said[1]) - float(said[2]) == pytest.approx(550)
    again = re.search(r"batches of (\d+);.*lightning-solo train (.*)", out)
    assert again is not None
    assert again[2] == f"data.batch_size={again[1]} solo=bf16"
    called(capsys, *CARD, again[2].split()[0], "solo=bf16", "--budget", "550MiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the device is the GPU")
def test_without_a_gpu_and_without_a_device_it_is_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = called(capsys, "--presets", "bf16,zero_offload")
    assert out.startswith("cpu, ")
    assert lines_with(out, "zero_offload: ", "strategy=zero_offload", "CUDA")
    assert lines_with(err, "zero_offload: ", "planned")


@pytest.mark.long
def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("plan", "model=byte_gpt_7b", *CARD),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    deadline = time.monotonic() + 500
    while len(started := below(process.pid)) < 2:  # the process that plans, and the one it has forked for this plan
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=500)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    while any(runs(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def below(pid: int) -> list[int]:
    try:
        children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(grandchild for child in children for grandchild in below(child))]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
def test_host_memory_is_judged_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*CARD, "solo=zero_offload", "model.depth=2"]
    out, _ = called(capsys, *asked, "--host-memory", "1MiB", code=1)
    assert re.search(r"^zero_offload +does not fit ", out, re.MULTILINE)
    said = r"(\S+ MiB on the host, which has 1\.00 MiB)"
    assert re.search(rf"^zero_offload: does not fit: {said}$", out, re.MULTILINE)
    assert re.search(rf"^none fits in 23\.52 GiB.*zero_offload,.* {said}$", out, re.M)
    out, _ = called(capsys, *asked)
    assert f"assumed: {HOST_NOT_JUDGED}" in out.splitlines()
    assert re.search(r"^zero_offload +fits ", out, re.MULTILINE)


def test_a_budget_above_the_memory_of_the_device_that_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = called(capsys, "solo=baseline", "--budget", "1024TiB", code=2)
    assert re.search(r"--budget 1048576\.00 GiB: .*\d.*; write less", err)


def test_calibrating_prints_the_readings_and_their_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = Readings("2026-11-22", {"fp16": 3.25e13, "bf16": None}, 1.6e11, 5e9, 200 * 2**20, 16 * 2**20)
    monkeypatch.setattr(calibrate, "calibrate", lambda: (calibrated(device("t4"), readings), readings, Path("it.json")))
    out, _ = called(capsys, "--calibrate")
    for words in (
        ("Tesla T4", "2026-11-22"),
        ("fp16", "32.50 TFLOP/s", "50% of 65"),
        ("copy", "160.0 GB/s", "50% of 320"),
        ("host", "5.0 GB/s"),
        ("context", "200.00 MiB"),
        ("workspace", "16.00 MiB"),
        ("it.json",),
    ):
        assert len(lines_with(out, *words)) == 1, words
    assert len(out.splitlines()) == 7
    out, _ = called(capsys, "--calibrate", "--json")
    told = json.loads(out)
    assert (told["device"], told["file"], told["context_bytes"]) == ("Tesla T4", "it.json", 200 * 2**20)


# --- the pictures ---


def test_parts_are_what_is_needed() -> None:
    found = parts(SAMPLE)
    assert found == {
        "weights": 4 * GiB,
        "gradients": 0,
        "optimizer states": 0,
        "activations": 5 * GiB,
        "temporaries": 0,
        "other": 0,
        "overhead": 3 * GiB,  # workspace and rounding, 1, and 12 needed of which 10 are torch's
    }
    assert sum(found.values()) == SAMPLE.needed_bytes


def test_bars_in_signs() -> None:
    beyond = replace(SAMPLE, preset="b", needed_bytes=32 * GiB)
    # 16 GiB in 16 cells and one for the mark, which is the 17th, behind 16: names take 5, figures 12
    first, second, legend, *_ = bars([SAMPLE, replace(SAMPLE, preset="b")], 17 + 5 + 12).plain.splitlines()
    assert first == "bf16 WWWWAAAAA---    |   12.00 GiB"
    assert second == "b    WWWWAAAAA---    |   12.00 GiB"
    assert legend.startswith("W weights  A activations  - overhead")
    assert legend.endswith("  | 16.00 GiB")
    first, second, *_ = bars([SAMPLE, beyond], 33 + 5 + 12).plain.splitlines()
    assert second == f"b    WWWWAAAAA{'-' * 7}|{'-' * 15}    32.00 GiB"
    far = bars([replace(SAMPLE, budget_bytes=100 * GiB)], 13 + 5 + 12).plain
    assert far.startswith("bf16 WWWWAAAAA---    12.00 GiB")
    assert "|" not in far


def test_the_picture_says_the_same_in_both_palettes() -> None:
    figure = picture([SAMPLE, replace(SAMPLE, preset="b", verdict="tight")])
    for palette in (LIGHT, DARK):
        spec = figure.draw(palette)
        drawn = [row for row in spec["datasets"]["data"] if row["name"] == "bf16"]
        assert [(row["part"], row["size"], row["sign"]) for row in drawn] == [
            ("W weights", 4.0, "W"),
            ("A activations", 5.0, "A"),
            ("- overhead", 3.0, "-"),
        ]
        assert spec["datasets"]["mark"] == [{"end": 16.0, "label": "budget 16.00 GiB"}]
        assert palette.marks[0] in json.dumps(spec)
    assert "bf16 12.00 GiB, fits; b 12.00 GiB, tight" in figure.alternative
    far = picture([replace(SAMPLE, budget_bytes=100 * GiB)])
    assert "mark" not in far.draw(LIGHT)["datasets"]
    assert "100.00 GiB" in far.title


def test_a_slower_preset_before_a_faster_one_has_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = replace(SAMPLE, preset="compact", seconds_per_step=0.495)
    monkeypatch.setattr(WORKER, "start", lambda: None)
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: ((plan.preset, plan) for plan in (SAMPLE, later)))
    out, _ = called(capsys, *CARD, "--presets", "bf16,compact")
    assert out.index("bf16 ") < out.index("compact ")
    assert lines_with(out, "2%", "1 ms", "changes less")
    later = replace(later, seconds_per_step=0.51)
    out, _ = called(capsys, *CARD, "--presets", "bf16,compact")
    assert "changes less" not in out


def test_assumptions_once_each_and_the_command_has_the_micro_batch() -> None:
    other = replace(SAMPLE, preset="b", assumptions=("b", "c"))
    assert assumptions([SAMPLE, other]) == ["assumed: a (bf16)", "assumed: b", "assumed: c (b)"]
    checked, _, _ = compose(parse(["solo=bf16", "data.batch_size=16"]))
    tight = replace(SAMPLE, micro_batch=4, verdict="tight", host_bytes=99, host_memory_bytes=100)
    assert lines_with(what_to_write([tight], [], checked), "4.00 GiB", "99 B on the host", "100 B: tight")
    assert lines_with(line(Setting("model.depth", 8, 1), 8, tight), "12.00 GiB", "99 B on the host", "100 B")
    said = what_to_write([replace(SAMPLE, micro_batch=4, verdict="tight")], ["data.batch_size=16"], checked)
    assert lines_with(said, "bf16 fits", "4.00 GiB", "tight", "13.00 GiB")
    assert said.endswith(": lightning-solo train data.batch_size=4 solo=bf16")
    for chosen, again in (
        ([], []),  # the module may have a loader of its own, for which data.batch_size is refused
        (["data.batch_size=32"], ["data.batch_size=4"]),
        (["+model.batch_size=8"], ["+model.batch_size=4"]),
    ):
        checked, _, _ = compose(parse([*THEIRS, *chosen, "solo=bf16"]))
        for verdict in ("fits", "does not fit"):
            plans = [replace(SAMPLE, micro_batch=4, largest_micro_batch=4, verdict=verdict)]
            said = what_to_write(plans, [*THEIRS, *chosen], checked)
            assert said.endswith(": " + shlex.join(["lightning-solo", "train", *THEIRS, *again, "solo=bf16"]))
            assert ("loader of batches of 4" in said) == (not chosen)


# --- what is refused, and how ---

BAD = {
    "--budget=0": ["--budget='0':", "B, KiB, MiB, GiB, TiB", "16GiB"],
    "--budget=-1": ["--budget='-1':", "16GiB"],
    "--budget=16 gigs": ["--budget='16 gigs':", "16GiB"],
    "--budget -4GiB": ["--budget='-4GiB':", "16GiB"],
    "--devise rtx-4090": ["--devise", nearest("--device")],
    "--device=rtx-4091": ["device='rtx-4091':", nearest("rtx_4090"), "a100_80gb"],
    "--device=rtx-4090 --budget=64GiB": ["--budget 64GiB:", "NVIDIA GeForce RTX 4090", "23.52 GiB"],
    "--micro-batch=0": ["--micro-batch 0:", "at least 1"],
    "--micro-batch=two": ["--micro-batch two:", "integer"],
    "--presets=bf61": ["--presets bf61:", nearest("bf16"), "accumulation, adapters, baseline"],
    "--presets=": ["--presets :", "''"],
    "--presets=auto": ["--presets auto:"],
    "--save-preset=a/b": ["--save-preset 'a/b'", "--save-preset my_run"],
    "--save-preset=mine --presets=bf16": ["--save-preset mine", "--presets bf16,solved"],
    "--save-preset=mine solo=bf16": ["--save-preset mine", "--presets bf16,solved"],
    "--save-preset=mine --largest=model.width": ["--save-preset and --largest"],
    "--host-memory=64": ["--host-memory='64':", "16GiB"],
    "--calibrate --device=t4 solo=bf16": ["--calibrate and --device=t4 solo=bf16:"],
    "solo=bf61": ["solo=bf61:", nearest("bf16")],
    "solo=bf16 --presets=fp16": ["solo=bf16 and --presets fp16:", "keep one"],
    "solo=bf16,fp16": ["'solo=bf16,fp16'", "write --presets a,b"],
    "model.width=32,64": ["'model.width=32,64'", "give one value"],
    "--picture=plan.jpg": ["--picture plan.jpg:", "--picture plan.png"],
    "-m": [": -m;", "lightning-solo train", "--device", "--budget"],
    "run=first": ["run=first:", "drop it"],
    "resume=auto": ["resume=auto:", "plan"],
    "hydra/launcher=basic": ["hydra/launcher=basic:", "plan"],
    "nonsense": ["key=value"],
    "model.widht=3": ["model.widht=3:", nearest("width")],
    "model=nope": ["model=nope:", "byte_gpt_124m"],
    "model=custom": ["model._target_"],
    "seed=1 seed=2": ["seed ", "twice"],
    "+trainer.callbacks=[] solo=bf16": ["trainer.callbacks=[]:", "preset"],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_lines(line: str) -> None:
    with pytest.raises(SoloError, match=mentions(*BAD[line])):
        compose(parse([line] if "gigs" in line else line.split()))


def test_a_refusal_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = called(capsys, "--budget", "16 gigs", "--json", code=2)
    assert out == ""
    assert err.startswith("lightning-solo: --budget='16 gigs'")


def test_error_common_to_all_presets_is_printed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, Exception] = {"": PresetError("data.batch_size=1: drop it")}
    monkeypatch.setattr(WORKER, "start", lambda: None)
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: iter(answers.items()))
    assert called(capsys, *CARD, "--presets", "bf16,fp16", code=2) == (
        "",
        "lightning-solo: data.batch_size=1: drop it\n",
    )
    answers = dict.fromkeys(("bf16", "fp16"), PlanError("no repeated blocks"))
    out, _ = called(capsys, *CARD, "--presets", "bf16,fp16", code=1)
    assert len(lines_with(out, "bf16", "fp16", "no repeated blocks")) == 1


def test_notes_are_of_presets_with_long_steps_and_of_caveats(preset_with_caveat: str) -> None:
    presets = {name: composed(name) for name in ("bf16", "accumulation", preset_with_caveat)}
    found = notes([replace(SAMPLE, preset=name) for name in presets], presets)
    assert [line.split(":")[0] for line in found] == ["accumulation", preset_with_caveat]
    assert notes([SAMPLE], presets) == []


def test_an_engines_plan_has_only_the_caveats_of_its_techniques() -> None:
    presets = {"fsdp": composed("fsdp", ["devices=3"]), "both": composed("fsdp", ["+callback=layer_drop"])}
    (found,) = notes([replace(SAMPLE, preset=name) for name in presets], presets)
    assert found.startswith("both: callback.layer_drop")


def test_the_fastest_of_presets_that_are_named_is_first(
    preset_with_caveat: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [replace(SAMPLE, preset=preset_with_caveat, seconds_per_step=0.1), SAMPLE]
    monkeypatch.setattr(WORKER, "start", lambda: None)
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: ((plan.preset, plan) for plan in plans))
    out, _ = called(capsys, *CARD, "--presets", f"bf16,{preset_with_caveat}", "--json")
    assert [plan["preset"] for plan in json.loads(out)["plans"]] == [preset_with_caveat, "bf16"]
    assert [parse(line).all_presets for line in ([], ["--presets", "bf16"], ["solo=bf16"])] == [True, False, False]


def test_a_plan_is_solved_if_no_preset_or_solved_is_named() -> None:
    lines = ["", "--presets bf16,solved", "--presets solved", "--presets [bf16,checkpointing],solved", "solo=bf16"]
    options = [parse(line.split()) for line in lines]
    assert [each.solves for each in options] == [True, True, True, True, False]
    assert options[1].presets == ("bf16",)
    assert options[2].presets == options[0].presets, "solved from all presets"
    assert options[3].presets == ("[bf16,checkpointing]",)
    assert not parse(["--largest", "model.width"]).solves


def test_solved_plan_is_shown_and_written_as_a_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    modes = {"keep": ["blocks.1"], "recompute": ["blocks.0"]}
    fields = {"precision": "bf16-mixed", "callback": {"activation_checkpointing": {"modes": modes}}}
    plans = [replace(SAMPLE, preset="solved", configuration=fields), replace(SAMPLE, verdict="does not fit")]
    asked: list[PlanRequest] = []

    def answers(request: PlanRequest, timeout_s: float) -> Iterator[tuple[str, Plan]]:
        asked.append(request)
        return ((plan.preset, plan) for plan in plans)

    monkeypatch.setattr(WORKER, "start", lambda: None)
    monkeypatch.setattr(WORKER, "answers", answers)
    line = [*CARD, "--presets", "bf16,compact,accumulation,bf16_true,checkpointing,solved"]
    out, _ = called(capsys, *line)
    assert list(asked[0].presets["solved"].bases) == ["bf16", "compact"]
    assert lines_with(out, "solved: keep: blocks.1")
    assert lines_with(out, "--save-preset my_run", "solo=my_run")
    out, _ = called(capsys, *line, "--save-preset", "mine", "--host-memory", "64GiB")
    assert asked[1].host_memory == 64 * GiB
    assert not asked[1].presets["solved"].whole_batch
    assert out.splitlines()[-1].endswith("lightning-solo train solo=mine")
    assert "replaces" not in out
    assert fields_of(composed("mine")) == fields
    plans[1] = replace(plans[1], preset="bf16", verdict="fits", seconds_per_step=plans[0].seconds_per_step / 2)
    out, _ = called(capsys, *line, "--save-preset", "mine", "--whole-batch")
    assert asked[2].presets["solved"].whole_batch
    assert lines_with(out, "solved is written to", "conf/solo/mine.yaml", "replaces", "rtx_4090 and 16.00 GiB")
    assert lines_with(out, "lightning-solo train", "solo=bf16")
    plans[:] = [replace(plan, verdict="does not fit") for plan in plans]
    out, _ = called(capsys, *line, "--save-preset", "other", code=1)
    assert lines_with(out, "other isn't written", "fits")
    assert not (tmp_path / "conf" / "solo" / "other.yaml").exists()
    out, err = called(capsys, *line, "--save-preset", "bf16", code=2)
    assert "--save-preset bf16: " in err


def test_a_preset_that_is_not_written_has_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = {"bf16": SAMPLE, "solved": PlanError("bf16 fits as it is")}
    monkeypatch.setattr(WORKER, "start", lambda: None)
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: iter(answers.items()))
    line = [*CARD, "--presets", "bf16,solved", "--save-preset", "mine"]
    assert lines_with(called(capsys, *line)[0], "mine isn't written: bf16 fits", "write solo=bf16")
    assert "mine isn't written" in json.loads(called(capsys, *line, "--json")[0])["advice"]
    assert not (tmp_path / "conf").exists()


def test_solved_plan_has_objects_that_the_command_line_allows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    timer = {"_target_": "lightning.pytorch.callbacks.Timer"}
    plans = [replace(SAMPLE, preset="solved", configuration={"precision": "bf16-mixed", "callback": {"timer": timer}})]
    monkeypatch.setattr(WORKER, "start", lambda: None)
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: ((plan.preset, plan) for plan in plans))
    allowed = [f"+solo.callback.timer._target_={timer['_target_']}", "allow=[lightning.pytorch.callbacks]"]
    out, _ = called(capsys, *CARD, "--presets", "bf16,solved", "--save-preset", "mine", *allowed)
    assert "solved fits" in out
    assert out.splitlines()[-1].endswith("lightning-solo train 'allow=[lightning.pytorch.callbacks]' solo=mine")


@pytest.mark.long
def test_solved_plan_fits_between_two_presets_and_its_preset_has_the_same_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    module = ["model=byte_gpt_tiny", "model.depth=6", "data.batch_size=64", *CARD]
    out, _ = called(capsys, *module, "--presets", "bf16,[bf16,checkpointing]", "--json")
    most, least = sorted((plan["needed_bytes"] for plan in json.loads(out)["plans"]), reverse=True)
    budget = ["--budget", f"{int((least + most) / 2 * 1.05) // 1024}KiB"]
    names = ["--presets", "bf16,[bf16,checkpointing],solved", "--save-preset", "mine"]
    out, _ = called(capsys, *module, *budget, *names, "--json")
    (solved,) = [plan for plan in json.loads(out)["plans"] if plan["preset"] == "solved"]
    assert solved["verdict"] == "fits"
    assert least < solved["needed_bytes"] < most
    out, _ = called(capsys, *module, *budget, "solo=mine", "--json")
    (again,) = json.loads(out)["plans"]
    assert again["needed_bytes"] == solved["needed_bytes"]


def test_a_preset_that_refuses_an_override_leaves_the_others() -> None:
    _, presets, refused = compose(parse(["--presets", "bf16,accumulation", "solo.accumulate_grad_batches=2"]))
    assert list(presets) == ["bf16"]
    assert presets["bf16"].accumulate_grad_batches == 2
    assert "callback.accumulation_schedule" in str(refused["accumulation"])
    _, presets, refused = compose(parse(["--presets", "bf16,fp16", "+trainer.precision=bf16-mixed"]))
    assert list(presets) == ["bf16"]
    assert lines_with(str(refused["fp16"]), "trainer.precision='bf16-mixed'", "precision='16-mixed'")


@pytest.mark.long
def test_a_model_that_depends_on_the_preset_is_planned_one_at_a_time() -> None:
    depends = [*THEIRS, "+model.precision=${solo.precision}"]
    with pytest.raises(SoloError, match=mentions("bf16 and bf16_true", "solo=")):
        compose(parse(["--presets", "bf16,checkpointing,bf16_true", *depends]))
    checked, _, _ = compose(parse(["solo=bf16_true", *depends]))
    assert checked.model["precision"] == "bf16-true"


@pytest.mark.parametrize("limit", [1, 63, 64, 100, 999, 1000, 10**5])
@pytest.mark.parametrize("first", [1, 64, 96, 5000])
@pytest.mark.parametrize("multiple_of", [1, 32])
def test_largest_value_is_the_last_multiple_that_fits(limit: int, first: int, multiple_of: int) -> None:
    tried: list[int] = []

    def fits(value: int) -> bool:
        tried.append(value)
        return value <= limit

    expected = limit // multiple_of * multiple_of
    assert largest(fits, first, multiple_of) == (expected, expected + multiple_of)
    assert len(tried) == len(set(tried)) <= 40
    assert all(value % multiple_of == 0 for value in tried)


def test_value_without_limit_ends_the_search() -> None:
    value, too_large = largest(lambda value: True, 8, 1)
    assert value >= 2**16
    assert too_large is None


def test_largest_starts_from_the_value_of_the_configuration_or_of_the_command_line() -> None:
    setting = setting_of(parse(["model=byte_gpt_tiny", "solo=bf16", "--largest", "model.width"]))
    assert (setting.key, setting.value, setting.multiple_of) == ("model.width", 128, 64)
    options = parse(["model=byte_gpt_tiny", "model.depth=6", "solo=bf16", "--largest", "model.depth"])
    setting = setting_of(options)
    assert (setting.value, setting.multiple_of) == (6, 1)
    assert setting.options(options, 9).overrides == ("model=byte_gpt_tiny", "model.depth=9")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--largest model.widht", ("--largest model.widht", nearest("width"))),
        ("--largest 3.5", ("--largest 3.5", "--largest model.width")),
        ("--largest +trainer.limit_val_batches", ("write one", "+trainer.limit_val_batches=64")),
        ("--largest model.dropout", ("model.dropout", "0.0", "whole numbers")),
        ("--largest model", ("--largest model", "whole numbers")),
        ("--largest run", ("--largest run", "--largest model.width")),
        ("--largest model.width --multiple-of 0", ("--multiple-of 0", "at least 1")),
        ("--multiple-of 8", ("--multiple-of 8", "--largest model.width")),
    ],
)
def test_largest_of_what_has_no_whole_number_is_refused(line: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SoloError) as error:
        setting_of(parse(["model=byte_gpt_tiny", "solo=bf16", *line.split()]))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_largest_of_a_custom_class_starts_from_the_default_of_its_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text("class Mine:\n    def __init__(self, depth=4, lr=1e-3, **others): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = ["model=custom", "model._target_=of_mine.Mine", "allow=[of_mine]", "solo=bf16"]
    options = parse([*line, "--largest", "model.depth"])
    setting = setting_of(options)
    assert (setting.value, setting.options(options, 9).overrides[-1]) == (4, "+model.depth=9")
    with pytest.raises(PresetError, match=mentions("model.lr is 0.001", "whole numbers")):
        setting_of(parse([*line, "--largest", "model.lr"]))
    with pytest.raises(PresetError, match=mentions(nearest("depth"), "are depth, lr; ", "+model.dpth=64")):
        setting_of(parse([*line, "--largest", "model.dpth"]))


@pytest.mark.long
def test_largest_width_fits_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model=byte_gpt_tiny", "solo=bf16", "--device", "rtx-4090", "--budget", "1GiB", "--json"]
    found = json.loads(called(capsys, *arguments, "--largest", "model.width")[0])
    setting = found["largest"]
    assert found["plans"][0]["verdict"] == "fits"
    assert setting["too_large"] == setting["value"] + 64
    assert conclusion(setting_of(parse([*arguments[:-1], "--largest", "model.width"])), setting["value"],
                      setting["too_large"], "bf16") == setting["conclusion"]  # fmt: skip
    for value, verdict in ((setting["value"], "fits"), (setting["too_large"], "tight")):
        needed = json.loads(called(capsys, *arguments, f"model.width={value}")[0])["plans"][0]
        assert needed["needed_bytes"] == setting["tried"][str(value)]
        assert (needed["verdict"] == "fits") == (verdict == "fits")


@pytest.mark.long
def test_a_value_that_cannot_be_planned_ends_the_search_with_the_largest_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["model=byte_gpt_tiny", "solo=bf16", "--device", "rtx-4090", "--json", "--largest", "model.heads"]
    setting = json.loads(called(capsys, *arguments)[0])["largest"]
    assert (setting["value"], setting["too_large"]) == (128, 129)
    assert lines_with(setting["conclusion"], "model.heads=128 is the largest", "129 can't be planned (", "heads=129")
    assert "no multiple of heads=3;" in called(capsys, *arguments, "model.heads=3", code=2)[1]


def test_conclusion_names_the_value_that_cannot_be_planned_and_how_to_leave_out_such_values() -> None:
    setting = Setting("model.width", 128, 64)
    assert "--multiple-of 1" in conclusion(setting, 256, 320, "bf16")
    refused = conclusion(setting, 256, 320, "bf16", "no multiple of heads=128")
    assert lines_with(refused, "width=256", "320 can't be planned (no multiple of heads=128)", "--multiple-of N tries")
    assert "--multiple-of 1" not in refused


@pytest.mark.long
def test_sweep_packs_jobs_by_their_plans() -> None:
    quick = ["experiment=quick", "model.width=32", "model.heads=2", "model.depth=4"]

    def planned(*overrides: str) -> int | None:
        return planned_bytes(compose_application([*quick, *overrides]))

    plain, recomputed = planned("solo=bf16"), planned("solo=checkpointing")
    assert plain is not None
    assert recomputed is not None
    assert 0 < recomputed < plain
    assert planned("solo=bf16", "seed=1") == plain
    assert len(NEEDED) == 2  # jobs that differ in their seed have one plan
    assert planned("solo=auto") is None
    assert planned("model.width=33") is None  # refused by the module
