"""Packages, host memory and build tools of this machine, found without importing torch."""

from __future__ import annotations

import functools
import getpass
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERSIONS = "versions.json"
"""File of a run: the `versions` at its start."""
PACKAGES = (
    *("lightning-solo", "torch", "lightning", "pytorch-lightning", "torchmetrics", "hydra-core", "deepspeed"),
    *("transformers", "peft"),
)
HOST_SHARE = "LIGHTNING_SOLO_HOST_SHARE"
"""Environment variable of a job that runs beside others: the bytes of host memory that it may use."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems whose files take the host's memory."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that a run depends on; imports none of them."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def usable_cores() -> int:
    """Return the number of cores that this process may use, as torch counts them for workers of a loader."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a None in sys.modules: its import is forbidden
        return False


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (total, available) bytes of the host for this process.

    The limits of its control groups count, and its share of the host if it is one of several jobs or ranks. Page
    cache counts as available: the kernel gives it back before anything fails.

    Args:
        root: the folder that contains `proc` and `sys`.
    """
    total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        fields = {name: text for name, _, text in (line.partition(":") for line in meminfo.read_text().splitlines())}
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in (*_memory_limits(root), *_share(root)):
        total, available = min(total, limit), min(available, limit - used)
    return total, max(available, 0)


def process_start(pid: int) -> int:
    """Return the second at which a process of this machine started, the same in all processes."""
    (boot,) = (line.split()[1] for line in _text(Path("/proc/stat")).splitlines() if line.startswith("btime"))
    ticks = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[19]
    return int(boot) + int(ticks) // os.sysconf("SC_CLK_TCK")


def host_share(processes: int) -> int:
    """Return the bytes of the host for this process, a value of `HOST_SHARE`, if so many processes start now."""
    return host_memory()[1] // processes + _resident(Path("/"))


def _resident(root: Path) -> int:
    """Return the bytes of host memory that only this process has."""
    resident, shared = map(int, _text(root / "proc/self/statm").split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _share(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) bytes of this process's share of the host, if `HOST_SHARE` sets one."""
    share = os.environ.get(HOST_SHARE, "")
    if share.isdigit() and (root / "proc/self/statm").is_file():
        yield int(share), _resident(root)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) bytes of the memory group of this process and of each above it, for cgroup v2 and v1."""
    files = {  # of the limit and the use; the name of reclaimable page cache in memory.stat
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for version, group in _groups(root):
        mount = root / "sys/fs/cgroup" / version
        limit_file, used_file, cache = files[version]
        folder = mount / group.lstrip("/")
        # In a container the path may be the host's. Its levels are missing here, and the mount is our group.
        for level in (folder, *folder.parents):
            limit = _text(level / limit_file)
            if limit.isdigit():
                stat = dict(line.split() for line in _text(level / "memory.stat").splitlines())
                used = int(_text(level / used_file) or 0) - int(stat.get(cache, 0))
                yield int(limit), max(used, 0)
            if level == mount:
                break


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", path) for cgroup v2 and ("memory", path) for v1, from lines such as `4:memory:/a/b` and `0::/a/b`."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            yield ("memory" if controllers else ""), path


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that holds a path; empty where the system does not report it."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    points = [(Path(point.replace("\\040", " ")), kind) for _, point, kind, *_ in lines]
    holding = [(len(point.parts), kind) for point, kind in points if path.is_relative_to(point)]
    # Of two mounts on the same point the later one is seen.
    return max(reversed(holding), key=lambda pair: pair[0])[1] if holding else ""


def tool_path() -> str:
    """Return the folders to search for tools: PATH, or the system's default without one."""
    return os.environ.get("PATH") or os.defpath


def cxx_compiler() -> str | None:
    """Return the command line of the C++ compiler: CXX where that is set, else the first on PATH; None without one."""
    if given := os.environ.get("CXX"):
        words = shlex.split(given)
        return given if words and shutil.which(words[0], path=tool_path()) else None
    found = (shutil.which(name, path=tool_path()) for name in ("c++", "g++", "clang++"))
    return next((path for path in found if path), None)


def ninja_executable() -> str | None:
    """Return the path of ninja: from the package ninja of this Python, else from PATH or the interpreter's folder."""
    if is_installed("ninja"):
        folder = getattr(importlib.import_module("ninja"), "BIN_DIR", None)
        if folder and (found := shutil.which("ninja", path=str(folder))):
            return found
    return shutil.which("ninja", path=os.pathsep.join([tool_path(), str(Path(sys.executable).parent)]))


def has_python_headers() -> bool:
    """Return whether Python.h is installed, which compiling extensions needs; Debian has it in python3-dev."""
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def links(function: str, library: str) -> bool:
    """Return whether a program that calls a C function of a library can be linked by the C++ compiler."""
    if (compiler := cxx_compiler()) is None:
        return False
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    program = f'extern "C" void {function}(void); int main() {{ {function}(); }}'
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "calls.cpp"), Path(folder, "calls")
        source.write_text(program)
        command = [*shlex.split(compiler), *flags[0], str(source), *flags[1], f"-l{library}", "-o", str(target)]
        environment = {**os.environ, "PATH": tool_path()}
        return subprocess.run(command, capture_output=True, env=environment, check=False).returncode == 0


def nvcc_release(cuda_home: str | None) -> tuple[int, int] | None:
    """Return (major, minor) of the CUDA toolkit in a folder, or None where no nvcc runs."""
    if cuda_home is None:
        return None
    try:
        command = [str(Path(cuda_home, "bin", "nvcc")), "-V"]
        found = re.search(r"release (\d+)\.(\d+)", subprocess.run(command, capture_output=True, text=True).stdout)
    except OSError:
        return None
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one.

    Attributes:
        number: its index in `nvidia-smi`; empty for a MIG instance.
        free_bytes, total_bytes: None where they are unknown, as for a MIG instance.
    """

    number: str
    name: str
    uuid: str
    free_bytes: int | None = None
    total_bytes: int | None = None


def nvidia_gpus() -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists, without starting CUDA; none where it isn't installed or fails.

    A GPU that is divided into MIG instances is followed by them.
    """
    memory = {}
    for line in _nvidia_smi("--query-gpu=uuid,memory.free,memory.total", "--format=csv,noheader,nounits"):
        uuid, *numbers = (text.strip() for text in line.split(","))
        memory[uuid] = [int(text) * 2**20 if text.isdigit() else None for text in numbers]
    gpus = []
    for line in _nvidia_smi("-L"):
        if found := re.match(r"GPU (\d+): (.+) \(UUID: (\S+)\)", line):
            gpus.append(Gpu(found[1], found[2], found[3], *memory.get(found[3], ())))
        elif found := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (\S+)\)", line):
            gpus.append(Gpu("", f"MIG {found[1]}", found[2]))
    return gpus


def _nvidia_smi(*arguments: str) -> list[str]:
    try:
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver; empty where it is unknown."""
    found = re.search(r"\d+\.\d+(\.\d+)?", _text(Path("/proc/driver/nvidia/version")))
    return found[0] if found else ""


def processor() -> str:
    """Return the name of the processor, such as ``AMD EPYC 7763 64-Core Processor``."""
    found = re.search(r"^model name\s*: (.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def processor_flags() -> str:
    """Return the processor's feature flags; compiled code runs on any processor with the same flags."""
    found = re.search(r"^(?:flags|Features).*", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[0] if found else platform.processor()


def user_cache() -> Path | None:
    """Return the user's folder for caches: ``$XDG_CACHE_HOME``, or ``~/.cache``.

    None for a user without a home folder, which is common in containers.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"
    return folder if folder.is_absolute() else None


class NotPrivateError(PermissionError):
    """Other users may write into a folder of machine code."""


def is_private(path: Path) -> bool:
    """Return whether a file or folder belongs to this user, and no other user may write into it."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def code_folders() -> dict[str, Path]:
    """Return the folders in which torch and Triton keep compiled code, by the environment variable that sets them."""
    home = Path.home()
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir(), f"torchinductor_{user}"),
        "TRITON_CACHE_DIR": Path(os.environ.get("TRITON_HOME") or home, ".triton", "cache"),
        "TORCH_EXTENSIONS_DIR": Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "torch_extensions"),
    }
    return {variable: Path(os.environ.get(variable) or default) for variable, default in defaults.items()}


def open_to_others(*variables: str) -> str | None:
    """Return why the code in one of `code_folders` can't be trusted, with the remedy; None if it can.

    The folder belongs to another user than this one or root, or all users may write into it.
    """
    for variable in variables:
        folder = code_folders()[variable]
        if folder.is_dir() and (folder.stat().st_uid not in (os.geteuid(), 0) or folder.stat().st_mode & 0o002):
            return others_may_write(folder, variable)
    return None


def others_may_write(folder: Path, variable: str) -> str:
    """Return the message for a folder that isn't private, with its remedy."""
    return (
        f"{folder} belongs to another user, or others may write into it, and its files are run as machine code; write"
        f" chmod -R go-w '{folder}' if it is yours and you trust its files, else {variable}=<a folder of yours>"
    )


def private_folder(root: Path, *parts: str) -> Path:
    """Return the folder ``parts`` below ``root``, for machine code; make it if it is missing.

    Raises:
        NotPrivateError: it belongs to another user, or others may write into it.
        OSError: it can't be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    if root.stat().st_mode & 0o1002 == 0o002:  # without the sticky bit others may replace what is in it
        raise NotPrivateError(
            f"all users may write into the folder {root}, which holds machine code; write chmod go-w '{root}'"
        )
    for part in parts:
        root = root / part
        root.mkdir(mode=0o700, exist_ok=True)
        if not is_private(root):
            raise NotPrivateError(
                f"other users may write into the folder {root}, whose files are loaded as machine code; write"
                f" chmod -R go-w '{root}' if it is yours and you trust its files, else remove it"
            )
    return root
