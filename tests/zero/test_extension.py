"""DeepSpeed's extensions: the checks before a build, the build, and its failures; test_cpp_builds.py tests the cache.

Builds run DeepSpeed, torch and ninja. The compiler is a script that copies a library that was compiled before, so that
a build takes a second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_solo.errors import CapabilityError, PresetError
from lightning_solo.machine import cxx_compiler, links, ninja_executable, nvcc_release
from lightning_solo.zero import extension
from lightning_solo.zero.extension import is_built, load_extension, what_is_missing
from tests.messages import mentions, nearest

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # the first test of a machine's life builds cpu_adam
ROOT = Path(__file__).parents[2]
LOAD = """
import os, sys
before = dict(os.environ)
from lightning_solo.zero.extension import is_built, load_extension, what_is_missing
print("built before:", is_built("cpu_adam"))
assert what_is_missing("cpu_adam") is None, what_is_missing("cpu_adam")
module = load_extension("cpu_adam")
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
from deepspeed.ops.op_builder import CPUAdamBuilder
assert CPUAdamBuilder().load() is module
print("loaded", module.__file__)
"""


@pytest.fixture
def library() -> Path:
    """The library that the real compiler made, in the user's cache."""
    return Path(str(load_extension("cpu_adam").__file__))


@pytest.fixture
def root(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test alone."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiler(folder: Path, library: Path | None) -> Path:
    """Write a compiler that copies the library when it links; without one it fails."""
    link = f"cp '{library}' \"$out\"" if library else "echo 'fatal error: no such thing' >&2; exit 1"
    script = folder / "g++"
    script.write_text(f"""#!/bin/sh
out=
while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done
case "$out" in
*.so) {link} ;;
*.o) echo "$out" >> '{folder}/compiled'; : > "$out" ;;
esac
""")
    script.chmod(0o755)
    return script


def start(code: str = LOAD, **environment: str) -> subprocess.Popen[str]:
    """Start Python with this environment and no other: no HOME, no PATH."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# --- acted ---


def test_it_is_built_once_and_deepspeed_finds_it(root: Path, tmp_path: Path, library: Path) -> None:
    tools = tmp_path / "tools"  # on PATH, and no ninja among them
    tools.mkdir()
    for tool in ("cp", "which"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    given = {"TORCH_EXTENSIONS_DIR": str(root), "CXX": str(compiler(tmp_path, library)), "PATH": str(tools)}
    first = start(**given)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert (tmp_path / "compiled").read_text().count(".o\n") == 2  # cpu_adam.cpp, cpu_adam_impl.cpp
    assert "building DeepSpeed's cpu_adam" in err
    assert "built DeepSpeed's cpu_adam in" in err
    (kept,) = root.glob("cpu_adam-*/cpu_adam.so")
    assert out.splitlines()[-2:] == ["built before: False", f"loaded {kept}"]
    # Built, it needs nothing more: neither a compiler nor a word.
    second = start(TORCH_EXTENSIONS_DIR=str(root), CXX="/nowhere/g++")
    out, err = second.communicate(timeout=120)
    assert (second.returncode, out.splitlines()[-2:]) == (0, ["built before: True", f"loaded {kept}"]), err
    assert "built DeepSpeed" not in err
    assert "building" not in err


def test_changed_sources_are_built_again(root: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes' own modules are left out, so that only the cache counts."""
    monkeypatch.setattr(extension, "loaded_extensions", lambda builder: {})
    assert not is_built("cpu_adam")
    (folder,) = root.iterdir()
    shutil.copy(library, folder)
    assert is_built("cpu_adam")
    time = Path.stat

    class Later:
        st_size, st_mtime_ns = 1, 1

    def stat(path: Path, **options: bool) -> object:
        return Later() if path.name == "cpu_adam.cpp" else time(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert not is_built("cpu_adam")


def test_an_empty_environment_loads_what_the_user_has_built(library: Path) -> None:
    environment = {"XDG_CACHE_HOME": cache} if (cache := os.environ.get("XDG_CACHE_HOME")) else {}
    process = start(**environment)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.splitlines()[-1:]) == (0, [f"loaded {library}"]), err


def test_doctor_builds_ahead_and_names_what_fails(root: Path, tmp_path: Path, library: Path) -> None:
    """The compiler hands out CPUAdam for everything, which loads under no other name."""
    doctor = "import sys; sys.argv[1:] = ['doctor', '--build']; from lightning_solo.cli import main; main()"
    given = {"TORCH_EXTENSIONS_DIR": str(root), "CXX": str(compiler(tmp_path, library)), "PATH": os.defpath}
    for word in ("built", "was built before"):
        process = start(doctor, **given)
        out, err = process.communicate(timeout=300)
        lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
        assert process.returncode == 1, out + err
        (kept,) = root.glob("cpu_adam-*/cpu_adam.so")
        assert lines["cpu_adam"] == f"{word}, {kept}"
        assert "could not be built" in lines["cpu_lion"]
    assert not [*root.glob("cpu_lion-*/*.so")]


# --- what a build lacks ---


def test_missing_tool_is_named_with_the_remedy(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert what_is_missing("cpu_lion") is None
    monkeypatch.setenv("CXX", "/nowhere/g++ -O2")
    assert "CXX names, '/nowhere/g++ -O2' (unset CXX)" in str(what_is_missing("cpu_lion"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cxx_compiler() is None
    assert "a C++ compiler (apt install g++)" in str(what_is_missing("cpu_lion"))
    monkeypatch.delenv("PATH")
    assert cxx_compiler() is not None  # os.defpath
    assert what_is_missing("cpu_lion") is None
    monkeypatch.setattr(extension, "ninja_executable", lambda: None)
    assert "ninja (pip install ninja)" in str(what_is_missing("cpu_lion"))
    with pytest.raises(CapabilityError, match="lacks ninja"):
        load_extension("cpu_lion")
    with pytest.raises(PresetError, match=nearest("cpu_adam")):
        what_is_missing("cpu_adm")


def test_ninja_is_found_without_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ninja_executable() is not None


def test_libaio_is_tried_with_the_linker(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert links("cos", "m")
    assert not links("no_such_function", "m")
    assert not links("cos", "no_such_library")
    monkeypatch.setattr(extension, "links", lambda function, library: (function, library) != ("io_submit", "aio"))
    monkeypatch.setattr(extension, "loaded_extensions", lambda builder: {})  # another test may have loaded it
    assert "apt install libaio-dev" in str(what_is_missing("async_io"))


def test_a_cuda_extension_needs_the_toolkit_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.cpp_extension
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder  # the one for CUDA

    builder = AsyncIOBuilder()
    assert extension._missing_toolkit(builder) is None
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert extension._missing_toolkit(builder) is None  # no device: built for the CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    assert "nvcc of CUDA 12 (install" in str(extension._missing_toolkit(builder))
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    assert nvcc_release(str(tmp_path)) == (11, 8)
    assert "holds 11.8 (set CUDA_HOME" in str(extension._missing_toolkit(builder))
    monkeypatch.setattr(torch.version, "cuda", "11.7")
    assert extension._missing_toolkit(builder) is None


# --- failures leave nothing ---


def test_a_failed_build_shows_the_end_and_can_be_repeated(root: Path, tmp_path: Path, library: Path) -> None:
    code = """
from lightning_solo.errors import CapabilityError
from lightning_solo.zero.extension import load_extension
import shutil, sys, threading
for attempt in range(2):  # torch's own versioner would skip the second, and fail to import
    try:
        load_extension("cpu_adam")
    except CapabilityError as error:
        assert "fatal error: no such thing" in str(error), error
        assert "CXX=g++" in str(error)
    else:
        raise AssertionError
assert threading.enumerate() == [threading.main_thread()]
print("failed twice")
"""
    failing = compiler(tmp_path, None)
    process = start(code, TORCH_EXTENSIONS_DIR=str(root), CXX=str(failing))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.splitlines()[-1:]) == (0, ["failed twice"]), err
    assert [path.name for path in root.glob("*/*")] == ["lock"]
    process = start(TORCH_EXTENSIONS_DIR=str(root), CXX=str(compiler(tmp_path, library)))
    assert "loaded" in process.communicate(timeout=120)[0]


@pytest.mark.parametrize("in_the_way", ["a file", "a shared folder"])
def test_a_folder_that_cannot_be_used_is_named(root: Path, in_the_way: str) -> None:
    if in_the_way == "a file":
        root.touch()
    else:
        what_is_missing("cpu_lion")  # makes the folder
        next(root.iterdir()).chmod(0o777)
    refused = mentions("cpu_lion", str(root), "write TORCH_EXTENSIONS_DIR=")
    with pytest.raises(CapabilityError, match=refused):
        load_extension("cpu_lion")
    assert str(root) in str(what_is_missing("cpu_lion"))
