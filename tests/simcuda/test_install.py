"""The device is installed where it can be; where it can't, the tests that need it are skipped with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.messages import lines_with
from tests.simcuda import build

pytestmark = pytest.mark.simcuda
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
TEST = """
    import pytest
    import torch
    @pytest.mark.gpu
    def test_device():
        assert torch.ones(3, device="cuda").sum().item() == 3
    @pytest.mark.gpu(needs="time")
    def test_speed():
        assert False
"""
PLUGIN = ("-p", "tests.simcuda.plugin", "-W", "ignore")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_by_the_plugin(pytester_run: Run):
    done = pytester_run(TEST, *PLUGIN)
    assert "1 passed, 1 skipped" in done.stdout
    assert "needs a GPU's time" in done.stdout
    assert "cuda: simulated" in done.stdout


@pytest.mark.long
def test_without_a_compiler_tests_are_skipped_with_the_reason(pytester_run: Run, tmp_path: Path):
    done = pytester_run(TEST, *PLUGIN, XDG_CACHE_HOME=str(tmp_path / "cache"), CXX="no-such-compiler")
    assert done.returncode == 0
    assert "2 skipped" in done.stdout
    assert "no C++ compiler" in done.stdout


def test_sources_that_do_not_compile_name_both_versions_of_torch(pytester_run: Run, tmp_path: Path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'hooks.h:3: error: no member named record' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = pytester_run(TEST, *PLUGIN, XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=str(compiler))
    assert "2 skipped" in done.stdout
    assert lines_with(done.stdout, f"written for torch {build.WRITTEN_FOR}", "compile for torch")
    assert "no member named record" in done.stdout


def test_with_torch_imported_already():
    done = run("-c", "import torch; from tests.simcuda import device; device.install()")
    assert done.returncode
    assert "imported already" in done.stderr.splitlines()[-1]


def test_a_torch_with_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(build, "torch_folder", lambda: tmp_path)
    with pytest.raises(build.UnavailableError, match="is built with CUDA"):
        build.library()


def test_two_processes_build_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho called >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(compiler)}
    command = [sys.executable, "-c", "from tests.simcuda import build; print(build.library())"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    both = [subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0] for process in both}
    assert len(paths) == 1
    sources = len(list(build.SOURCES.glob("*.cpp")))
    assert len((tmp_path / "calls").read_text().splitlines()) == sources + 1  # and the linking, each once


# --- python -m tests.simcuda ---


def test_a_script_and_a_module(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import sys, torch\nprint(torch.ones(3, device='cuda').sum().item(), sys.argv[1:])\n")
    done = run("-m", "tests.simcuda", str(script), "one", "--two")
    assert (done.returncode, done.stdout.strip()) == (0, "3.0 ['one', '--two']")
    done = run("-m", "tests.simcuda", "-m", "tests.simcuda.build")
    assert done.returncode == 0


def test_a_script_that_races_and_one_that_fails(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nx = torch.ones(3, device='cuda')\nwith torch.cuda.stream(torch.cuda.Stream()):\n    x.add_(1)\n"
    )
    done = run("-m", "tests.simcuda", str(script))
    assert done.returncode == 3
    assert "race: write by aten::add_ on stream 1" in done.stderr
    assert "script.py:4" in done.stderr
    script.write_text("raise SystemExit(7)\n")
    assert run("-m", "tests.simcuda", str(script)).returncode == 7


def test_pytest_gets_the_plugin(tmp_path: Path):
    (tmp_path / "test_one.py").write_text("import torch\ndef test_it():\n    assert torch.cuda.is_available()\n")
    arguments = ("-c", os.devnull, "-p", "no:cacheprovider", str(tmp_path))
    done = run("-m", "tests.simcuda", "-m", "pytest", *arguments)
    assert "1 passed" in done.stdout
    assert "cuda: simulated" in done.stdout


def test_missing_device_is_reported(tmp_path: Path):
    done = run("-m", "tests.simcuda", "x.py", XDG_CACHE_HOME=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 2
    assert "no C++ compiler" in done.stderr
