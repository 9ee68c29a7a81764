"""The device table: what each file says is possible, names as people write them, and users' own files."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_solo.errors import PresetError
from lightning_solo.machine import host_memory
from lightning_solo.planner.device import CAPABILITIES, device, devices, this_device
from lightning_solo.presets.devices import KINDS
from lightning_solo.presets.files import conf_folder, preset_files
from lightning_solo.units import GiB
from tests.messages import mentions, nearest

PRINTED_GB = {  # on the box, in 10**9 or 2**30 as the maker likes; the driver leaves less than the smaller of them
    "a100_40gb": 40,
    "a100_80gb": 80,
    "h100": 80,
    "h200": 141,
    "l4": 24,
    "l40s": 48,
    "laptop_8gb": 8,
    "rtx_3090": 24,
    "rtx_4090": 24,
    "rtx_5090": 32,
    "t4": 16,
}
WHOLE = """\
label: Acme 9000
memory_bytes: 12345678901
memory_bandwidth: 5.0e11
host_bandwidth: 1e10
flops: {bf16: 2e13, fp16: 2e13, tf32: null, fp32: 1e13, fp64: null}
context_bytes: 0
workspace_bytes: 8519680
source: measured
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's own devices, in the working directory."""
    folder = tmp_path / "conf" / "solo" / "device"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return folder


# --- the table ---


def test_every_device_is_in_the_tables_of_this_test_and_of_the_code() -> None:
    assert devices() == [*PRINTED_GB, "cpu"]
    assert set(CAPABILITIES) == set(PRINTED_GB)


@pytest.mark.parametrize("name", PRINTED_GB)
def test_figures_are_possible(name: str) -> None:
    found = device(name)
    assert found.name == name
    # 48 GB with ECC in the memory itself leave 44.4 GiB, 24 leave 22.0
    assert 0.9 * PRINTED_GB[name] * GiB < found.memory_bytes < PRINTED_GB[name] * GiB
    assert 2e11 < found.memory_bandwidth < 1e13
    assert 1e10 < found.host_bandwidth < 6.4e10 < found.memory_bandwidth
    assert 0.1 * GiB < found.context_bytes < 1 * GiB
    # cuBLAS: :4096:2:16:8 KiB = 2 x 4096 KiB + 8 x 16 KiB, and 32 MiB on sm_90
    sm_90 = CAPABILITIES[name] == (9, 0)
    assert found.workspace_bytes == (32 * 2**20 if sm_90 else (2 * 4096 + 8 * 16) * 1024)
    assert found.source.startswith("https://")


@pytest.mark.parametrize("name", PRINTED_GB)
def test_fewer_bits_are_not_slower(name: str) -> None:
    flops = device(name).flops
    assert tuple(flops) == KINDS
    speeds = [speed for speed in flops.values() if speed is not None]
    assert speeds == sorted(speeds, reverse=True)
    has_bf16 = CAPABILITIES[name] >= (8, 0)
    assert [kind for kind in KINDS if flops[kind] is None] == ([] if has_bf16 else ["bf16", "tf32"])
    if has_bf16:
        # dense figures: a tensor core takes twice as many bf16 as tf32, with sparsity on one side it would be 4 or 1
        assert flops["bf16"] == flops["fp16"] == pytest.approx(2 * (flops["tf32"] or 0), rel=0.02)
    is_geforce = "GeForce" in device(name).label  # which sums in fp16 at twice the rate
    assert flops["fp16_accumulate"] == pytest.approx((2 if is_geforce else 1) * (flops["fp16"] or 0), rel=0.001)


def test_devices_are_in_their_known_order() -> None:
    def order(by: str, *names: str) -> None:
        figures = [getattr(device(name), by) for name in names]
        assert figures == sorted(figures, reverse=True)

    order("memory_bandwidth", "h200", "h100", "a100_80gb", "rtx_5090", "a100_40gb", "rtx_4090", "rtx_3090", "l40s")
    order("memory_bytes", "h200", "a100_80gb", "l40s", "a100_40gb", "rtx_5090", "rtx_3090", "rtx_4090", "l4")
    speeds = [device(name).flops["fp16"] for name in ("h100", "l40s", "a100_40gb", "rtx_5090", "rtx_4090", "l4", "t4")]
    assert speeds == sorted(speeds, reverse=True)  # type: ignore[type-var]


@pytest.mark.parametrize("name", PRINTED_GB)
def test_every_file_names_its_gpu_first_and_says_what_was_not_verified(name: str) -> None:
    text = (conf_folder() / "library" / "solo" / "device" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# NVIDIA ")
    gib = re.search(r"memory_bytes: \d+  # (\d+\.\d\d) GiB", text)
    assert gib is not None
    assert float(gib[1]) == pytest.approx(device(name).memory_bytes / GiB, abs=0.006)
    mib = re.search(r"context_bytes: \d+  # (\d+) MiB", text)
    assert mib is not None
    assert int(mib[1]) * 2**20 == device(name).context_bytes


def test_a_device_is_no_preset() -> None:
    assert not set(preset_files()) & {"device", *PRINTED_GB}


# --- names ---


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((name, name) for name in PRINTED_GB),
        ("rtx-4090", "rtx_4090"),
        ("RTX 4090", "rtx_4090"),
        ("rtx4090", "rtx_4090"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("GeForce RTX 3090", "rtx_3090"),
        ("Tesla T4", "t4"),
        ("H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100-SXM4-40GB", "a100_40gb"),
        ("a100-80gb", "a100_80gb"),
        ("RTX 4060 Laptop", "laptop_8gb"),
        ("CPU", "cpu"),
    ],
)
def test_names_as_people_and_torch_write_them(given: str, name: str) -> None:
    assert device(given).name == name


def test_labels_are_names() -> None:
    assert [device(device(name).label).name for name in PRINTED_GB] == list(PRINTED_GB)


@pytest.mark.parametrize(
    ("given", "close"),
    [
        ("rtx_4091", "rtx_4090"),
        ("NVIDIA GeForce RTX 4080", "rtx_4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx_4090"),  # a tenth fewer multiprocessors: another device
        ("a100", "a100_80gb"),
        ("h10", "h100"),
    ],
)
def test_an_unknown_name_offers_the_nearest(given: str, close: str) -> None:
    allowed = ("a100_40gb, ", "conf/solo/device/<name>.yaml")
    with pytest.raises(PresetError, match=mentions(f"device={given!r}: ", nearest(close), *allowed)):
        device(given)


@pytest.mark.parametrize("given", ["", "  ", "NVIDIA", None, 4090, "../../app/train"])
def test_invalid_name_is_refused(given: object) -> None:
    with pytest.raises(PresetError, match="rtx_4090"):
        device(given)  # type: ignore[arg-type]


def test_cpu_has_the_hosts_memory_and_nothing_of_cuda() -> None:
    found = device("cpu")
    assert found.memory_bytes == host_memory()[0]
    assert (found.context_bytes, found.workspace_bytes) == (0, 0)
    assert "guess" in found.source
    assert found.flops["fp32"]


def test_device_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(device("h100"))) == device("h100")


# --- a user's own files ---


def test_a_users_file_is_found_by_file_name_and_by_label(own: Path) -> None:
    (own / "acme_9000.yaml").write_text(WHOLE)
    assert "acme_9000" in devices()
    found = device("acme-9000")
    assert found == device("ACME 9000")
    assert (found.memory_bytes, found.host_bandwidth, found.context_bytes) == (12345678901, 1e10, 0)
    flops = {"bf16": 2e13, "fp16": 2e13, "tf32": None, "fp32": 1e13, "fp64": None}
    assert found.flops == {"fp16_accumulate": 2e13, **flops}, "as fast as with sums in fp32"
    (own / "acme_9000.yaml").write_text(WHOLE.replace("{bf16", "{fp16_accumulate: 4e13, bf16"))
    assert device("acme-9000").flops == {"fp16_accumulate": 4e13, **flops}


def test_speeds_of_copies_both_ways(own: Path) -> None:
    (own / "acme.yaml").write_text(WHOLE)
    assert device("acme").copy_speeds() == (1e10, (1e10, 1e10))
    (own / "acme.yaml").write_text(WHOLE + "host_bandwidth_both: [4e9, 2e10]\n")
    assert device("acme").copy_speeds() == (1e10, (4e9, 1e10))
    (own / "acme.yaml").write_text(WHOLE + "host_bandwidth_both: [4e9, 8e9]\nhost_memory_bandwidth: 6e9\n")
    alone, both = device("acme").copy_speeds()
    assert (alone, *both) == pytest.approx((6e9, 2.4e9, 3.6e9))  # 4 and 6 share 6


def test_users_file_overrides_ours(own: Path) -> None:
    (own / "t4.yaml").write_text(WHOLE)
    assert device("t4").label == "Acme 9000"
    assert devices().count("t4") == 1


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ("label: Acme 9000", "", ["write label: "]),
        ("label: Acme 9000", "label: 9000", ["label=9000: "]),
        ("memory_bytes: 12345678901", "", ["write memory_bytes: 25253904384"]),
        ("memory_bytes: 12345678901", "memory_bytes: 0", ["memory_bytes=0: ", "at least 1, in bytes"]),
        ("memory_bytes: 12345678901", "memory_bytes: 12GiB", ["memory_bytes='12GiB': ", "at least 1"]),
        ("memory_bytes: 12345678901", "memory_bytes: 1.5e10", ["memory_bytes=15000000000.0: ", "integer"]),
        ("memory_bytes: 12345678901", "memory_byte: 1", ["memory_byte=1: ", nearest("memory_bytes")]),
        ("memory_bandwidth: 5.0e11", "memory_bandwidth: -1", ["memory_bandwidth=-1: ", "above 0, in bytes"]),
        ("host_bandwidth: 1e10", "host_bandwidth: .inf", ["host_bandwidth=inf: ", "above 0"]),
        ("host_bandwidth: 1e10", "host_bandwidth: true", ["host_bandwidth=True: ", "above 0"]),
        (
            "source: measured",
            "source: a\nhost_bandwidth_both: 1e10",
            ["host_bandwidth_both=10000000000.0: ", "two numb"],
        ),
        (
            "source: measured",
            "source: a\nhost_bandwidth_both: [1e10, 0]",
            ["host_bandwidth_both=", "above 0", "[1.2e10"],
        ),
        ("source: measured", "source: a\nhost_memory_bandwidth: -1", ["host_memory_bandwidth=-1: ", "above 0"]),
        ("source: measured", "source: a\nhost_bandwidth_bot: 1", ["no such field", nearest("host_bandwidth_both")]),
        ("context_bytes: 0", "context_bytes: -1", ["context_bytes=-1: ", "at least 0, in bytes"]),
        ("fp32: 1e13", "fp32: null", ["flops.fp32=None: ", "above 0, in operations"]),
        ("fp32: 1e13", "fp32: -1", ["flops.fp32=-1: ", "above 0"]),
        ("tf32: null, ", "", ["flops.tf32", "write tf32: null", "82.6e12"]),
        ("tf32: null", "fp8: 1e15, tf32: null", ["flops.fp8=1000000000000000.0: "]),
        ("source: measured", "source: ''", ["source='': "]),
        ("source: measured", "source: ${gone}", ["gone"]),
        ("source: measured", "source: [", []),
    ],
)
def test_a_users_file_is_checked_field_by_field(own: Path, line: str, instead: str, says: list[str]) -> None:
    file = own / "acme.yaml"
    assert line in WHOLE
    file.write_text(WHOLE.replace(line, instead))
    with pytest.raises(PresetError, match=mentions(f"device 'acme': {file}", *says)):
        device("acme")
    assert device("h100").name == "h100", "a broken file is in nobody else's way"


@pytest.mark.parametrize("text", ["", "- h100\n", "flops: 3\n" + WHOLE.replace("flops", "# flops")])
def test_a_file_of_another_shape_is_refused(own: Path, text: str) -> None:
    (own / "acme.yaml").write_text(text)
    with pytest.raises(PresetError, match=r"must (hold|be) a mapping"):
        device("acme")


# --- the device here ---


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA device that this machine pretends to have."""
    found = SimpleNamespace(name="", major=0, minor=0, total_memory=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    return found


def test_without_cuda_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_device().name == "cpu"


def test_a_known_device_has_the_drivers_memory(here: SimpleNamespace) -> None:
    here.name, here.major, here.minor, here.total_memory = "NVIDIA GeForce RTX 4090", 8, 9, 25_000_000_000
    found = this_device()
    assert (found.name, found.memory_bytes) == ("rtx_4090", 25_000_000_000)
    assert found.flops == device("rtx_4090").flops


@pytest.mark.parametrize(
    ("label", "capability", "gib", "name", "like"),
    [
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 47.5, "rtx_6000_ada_generation", "l40s"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", (8, 9), 7.6, "rtx_4070_laptop", "laptop_8gb"),
        ("NVIDIA A100 80GB PCIe", (8, 0), 79.1, "a100_80gb_pcie", "a100_80gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 9.8, "h100_80gb_hbm3_mig_1g_10gb", "h100"),
        ("NVIDIA B200", (10, 0), 178.0, "b200", "h200"),  # no sm_100 in the table: the highest below it
        ("Tesla P100", (6, 0), 15.9, "p100", "t4"),  # older than all of them
    ],
)
def test_an_unknown_device_is_like_the_nearest_and_says_so(
    here: SimpleNamespace, label: str, capability: tuple[int, int], gib: float, name: str, like: str
) -> None:
    here.name, (here.major, here.minor), here.total_memory = label, capability, int(gib * GiB)
    found, near = this_device(), device(like)
    assert (found.name, found.label, found.memory_bytes) == (name, label, int(gib * GiB))
    assert (found.flops, found.context_bytes) == (near.flops, near.context_bytes)
    assert f"as of {near.label}" in found.source
    assert f"{capability[0]}.{capability[1]}" in found.source


def test_file_named_by_an_unknown_device_is_used(own: Path, here: SimpleNamespace) -> None:
    here.name, here.major, here.minor, here.total_memory = "NVIDIA B200", 10, 0, 178 * GiB
    file = re.search(r"conf/solo/device/\w+\.yaml", this_device().source)
    assert file is not None
    Path(file[0]).write_text(WHOLE)
    assert this_device().flops["fp32"] == 1e13
    assert this_device().memory_bytes == 178 * GiB


@pytest.mark.gpu
def test_the_device_here_has_the_memory_that_torch_reports() -> None:
    assert this_device().memory_bytes == torch.cuda.get_device_properties(0).total_memory
