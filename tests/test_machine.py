"""Host memory as the process may use it: files of a machine laid out below a folder, for each kind of control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_solo.machine import host_memory
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
