"""Host memory as the process may use it: files of a machine laid out below a folder, for each kind of control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_solo.machine import HOST_SHARE, Gpu, host_memory, nvidia_gpus
from lightning_solo.units import GiB

NONE_V1 = str(2**63 - 4096)  # what cgroup v1 writes for no limit


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Lay out a machine of 64 GiB, of which 40 are available, and the given files below sys/fs/cgroup."""
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 1024 kB\nMemAvailable: {40 * 2**20} kB\n"
    contents = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    contents |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def v2(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 1\nfile 2\ninactive_file {cache}\nactive_file 7"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": str(used), f"{folder}memory.stat": stat}


def v1(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"cache 3\ninactive_file 5\ntotal_inactive_file {cache}"
    return {
        f"memory/{folder}memory.limit_in_bytes": limit,
        f"memory/{folder}memory.usage_in_bytes": str(used),
        f"memory/{folder}memory.stat": stat,
    }


def test_without_control_groups(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path, "", {})) == (64 * GiB, 40 * GiB)


def test_the_group_of_this_process_counts_and_not_the_root(tmp_path: Path) -> None:
    files = v2("a/b/", str(16 * GiB), 6 * GiB) | v2("a/other/", str(1 * GiB), GiB)
    assert host_memory(machine(tmp_path, "0::/a/b", files)) == (16 * GiB, 10 * GiB)


def test_the_smallest_limit_up_the_tree_counts(tmp_path: Path) -> None:
    # Below 32 GiB, of which all children use 30; the group itself has no limit.
    files = v2("a/b/", "max", 2 * GiB) | v2("a/", str(32 * GiB), 30 * GiB) | v2("", str(48 * GiB), 31 * GiB)
    assert host_memory(machine(tmp_path, "0::/a/b", files)) == (32 * GiB, 2 * GiB)


def test_page_cache_can_be_given_back(tmp_path: Path) -> None:
    files = v2("a/", str(16 * GiB), 15 * GiB, cache=9 * GiB)
    assert host_memory(machine(tmp_path, "0::/a", files)) == (16 * GiB, 10 * GiB)


def test_a_limit_above_what_the_machine_has_changes_nothing(tmp_path: Path) -> None:
    files = v2("a/", str(100 * GiB), GiB)
    assert host_memory(machine(tmp_path, "0::/a", files)) == (64 * GiB, 40 * GiB)


def test_cgroup_v1(tmp_path: Path) -> None:
    files = v1("job/step/", NONE_V1, GiB) | v1("job/", str(8 * GiB), 5 * GiB, cache=2 * GiB) | v1("", NONE_V1, 0)
    lines = "5:cpu,cpuacct:/elsewhere\n4:memory:/job/step\n0::/"
    assert host_memory(machine(tmp_path, lines, files)) == (8 * GiB, 5 * GiB)


@pytest.mark.parametrize("path", ["/docker/1234", "/../../outside"])
def test_in_a_container_the_mount_is_the_group(tmp_path: Path, path: str) -> None:
    files = v2("", str(4 * GiB), GiB)
    assert host_memory(machine(tmp_path, f"0::{path}", files)) == (4 * GiB, 3 * GiB)


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path, "0::/", v2("", str(GiB), 2 * GiB))) == (GiB, 0)


def test_this_machine() -> None:
    total, available = host_memory()
    assert 0 < available <= total


# --- a share of it ---


def test_share_of_a_job_is_less_what_the_job_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    root = machine(tmp_path, "", {})
    (root / "proc/self/statm").write_text(f"900000 {3 * GiB // page} {GiB // page} 1 0 5 0\n")  # resident, shared
    monkeypatch.setenv(HOST_SHARE, str(10 * GiB))
    assert host_memory(root) == (10 * GiB, 8 * GiB)
    monkeypatch.setenv(HOST_SHARE, str(60 * GiB))
    assert host_memory(root) == (60 * GiB, 40 * GiB)
    monkeypatch.delenv(HOST_SHARE)
    assert host_memory(root) == (64 * GiB, 40 * GiB)


# --- GPUs ---

LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
  MIG 3g.20gb     Device  0: (UUID: MIG-cccc)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-bbbb/2/0)"""
MEMORY = "GPU-aaaa, 81000, 81559\nGPU-bbbb, [N/A], 40960"


def test_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for number, (listed, memory, failed) in enumerate([(LISTED, MEMORY, 0), (LISTED, "", 0), (LISTED, MEMORY, 9)]):
        (tmp_path / "listed").write_text(f"{listed}\n")
        (tmp_path / "memory").write_text(f"{memory}\n")
        folder = tmp_path
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {folder}/listed || cat {folder}/memory; exit {failed}\n')
        program.chmod(0o755)
        known = number == 0
        expected = [
            Gpu("0", "NVIDIA H100 80GB HBM3", "GPU-aaaa", *((81000 * 2**20, 81559 * 2**20) if known else ())),
            Gpu("1", "NVIDIA A100-SXM4-40GB", "GPU-bbbb", *((None, 40960 * 2**20) if known else ())),
            Gpu("", "MIG 3g.20gb", "MIG-cccc"),
            Gpu("", "MIG 1g.5gb", "MIG-GPU-bbbb/2/0"),
        ]
        assert nvidia_gpus() == ([] if failed else expected)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert nvidia_gpus() == []
