"""README and documentation say what is true: their Python and commands run, YAML composes, tables have a command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate

from hydra_plugins.lightning_solo.launcher import SoloLauncherConf
from hydra_plugins.lightning_solo.sweeper import SoloOptunaSweeperConf
from lightning_solo import errors
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.phase import Phase
from lightning_solo.cli import COMMANDS
from lightning_solo.cli import convert as convert_command
from lightning_solo.cli import export as export_command
from lightning_solo.cli import generate as generate_command
from lightning_solo.cli import predict as predict_command
from lightning_solo.cli import results as results_command
from lightning_solo.cli import soft_labels as soft_labels_command
from lightning_solo.cli.command_line import check_command_line
from lightning_solo.cli.ladder_line import compose_base
from lightning_solo.cli.ladder_line import parse as parse_ladder
from lightning_solo.cli.plan_line import compose as compose_plan
from lightning_solo.cli.plan_line import parse as parse_plan
from lightning_solo.presets.compose import compose, hydra_of_our_own
from lightning_solo.sweeps.outcome import STATUSES
from tests.pages import DOCS, FILES, PAGES, ROOT, TABLES, Page

NUMBER = re.compile(r"\d+\.\d+")
MEASURED = re.compile(r"\d\s?(?:ms|µs|s|[KMGT]iB|%)(?![\w/])|±")
QUICK = ("index.md", "guides/command_line.md")
"""Pages whose Python runs in `make test`; that of the others takes minutes."""
REALLY_RUN = ("guides/hydra.md", "guides/lightning_cli.md")
"""Pages whose `python ...` commands run in a test, which takes a minute."""


each_page = pytest.mark.parametrize("page", PAGES, ids=str)


@pytest.fixture
def folder(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a reader has written the files that the page shows."""
    for name, text in {**FILES, **{block.file: block.text for block in page.blocks if block.file}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = (ROOT, folder, ROOT / "examples" / "own_technique")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "250"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def assert_printed(expected: str, printed: str) -> None:
    """Every line is there; numbers with a point within a tenth, since processors differ; ``...`` is anything."""
    for line in expected.strip().splitlines():
        pattern = re.escape(NUMBER.sub("(NUMBER)", line)).replace(re.escape("(NUMBER)"), r"(\d+\.\d+)")
        match = re.search(pattern.replace(re.escape("..."), ".*"), printed)
        assert match, f"{line!r} was not printed:\n{printed}"
        for shown, real in zip(NUMBER.findall(line), match.groups(), strict=True):
            assert float(real) == pytest.approx(float(shown), rel=0.1)


# --- Python ---


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if str(page) in QUICK else pytest.mark.long, id=str(page))
        for page in PAGES
        if any(not block.file for block in page.of("python"))
    ],
)
def test_python_runs_and_prints_what_it_says(page: Page, folder: Path) -> None:
    blocks = [block for block in page.of("python") if not block.file]
    marks = ["\nimport sys; print('\\x1e', flush=True); print('\\x1e', file=sys.stderr, flush=True)\n" for _ in blocks]
    (folder / "page.py").write_text("".join(block.text + mark for block, mark in zip(blocks, marks, strict=True)))
    done = run([sys.executable, "page.py"], folder)
    assert done.returncode == 0, done.stderr
    out, err = (text.split("\x1e") for text in (done.stdout, done.stderr))
    assert len(out) == len(err) == len(blocks) + 1
    for block, printed, said in zip(blocks, out, err, strict=False):
        assert_printed(block.output, printed + said)


# --- YAML ---


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.file for b in page.of("yaml"))], ids=str)
def test_yaml_composes(page: Page, folder: Path) -> None:
    for block in page.of("yaml"):
        path = Path(block.file)
        assert yaml.safe_load(block.text)
        if path.parts[:2] == ("conf", "solo"):
            assert compose(path.stem).precision is not None
            assert "Runs on: " in block.text.partition("\n")[0]
        elif path.parts[0] == "conf":
            with hydra_of_our_own(), initialize_config_dir(str(folder / "conf"), version_base="1.3"):
                assert hydra_compose("train").solo.precision == "bf16-mixed"
        elif "configs" in path.parts:
            config = yaml.safe_load(block.text)
            if "defaults" in config:
                continue  # `test_commands_of_applications_run` composes it
            made = [instantiate(config)] if "_target_" in config else [instantiate(node) for node in config.values()]
            assert all(type(thing).__module__.startswith("lightning") for thing in made)
        else:
            for node in yaml.safe_load(block.text)["fit"]["trainer"].get("callbacks", []):
                module, _, name = node["class_path"].rpartition(".")
                getattr(import_module(module), name)(**node.get("init_args", {}))


def test_readmes_yaml_is_in_the_guide() -> None:
    for block in PAGES[0].of("yaml"):
        assert block.text in FILES["conf/train.yaml"]


# --- commands ---


def check_solo(arguments: list[str]) -> None:
    name, *rest = arguments
    if name == "train":
        check_command_line(rest)
    elif name == "plan":
        options = parse_plan(rest)
        if not options.calibrate:
            compose_plan(options)
    elif name == "ladder":
        compose_base(parse_ladder(rest))
    elif name == "results":
        options = results_command._parser().parse_args(rest)
        assert options.sort in results_command.COLUMNS
    elif name == "convert":
        assert convert_command.parse(rest).to in ("plain", "compact")
    elif name == "export":
        export_command.parse(rest)
    elif name == "generate":
        generate_command.parse(rest)
    elif name == "predict":
        predict_command.parse(rest)
    elif name == "soft-labels":
        check_command_line(soft_labels_command.parse(rest).overrides)
    elif name == "report":
        assert len(rest) == 1
    elif name == "doctor":
        assert rest in ([], ["--build"])
    elif name == "show":
        import_module("lightning_solo.cli.show").run(rest)
    else:
        assert name in COMMANDS
        assert not rest


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (word for word in arguments if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def check_python(arguments: list[str]) -> None:
    path = next(word for word in arguments if word.endswith(".py"))
    overrides = [word for word in arguments[arguments.index(path) + 1 :] if "=" in word and word[:2] != "--"]
    assert (ROOT / path).is_file() or path in FILES or path in ("main.py", "template/train.py"), path
    OverridesParser.create().parse_overrides(overrides)


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    for extra in re.findall(r"lightning-solo\[(\w+)\]", " ".join(arguments)):
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), extra


PROGRAMS = {
    "lightning-solo": check_solo,
    "make": check_make,
    "python": check_python,
    "pip": check_pip,
    "git": len,
    "cd": len,
    "mv": len,
}


def check(command: str) -> None:
    """Check a command line against the program that it calls."""
    for part in command.replace("<this repository>", "URL").split(" && "):
        words = shlex.split(part)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        PROGRAMS[words[0]](words[1:])


@pytest.mark.filterwarnings("ignore:.* of preset .* replaces")  # what the page says of combined presets
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if str(page) == "guides/planning.md" else (), id=str(page))
        for page in PAGES
        if page.commands()
    ],
)
def test_commands_are_accepted(page: Page, folder: Path) -> None:
    if "own_technique" in page.text:
        pytest.skip("its package is installed in tests/contract/test_own_technique.py, which runs these commands")
    for command, output in page.commands():
        if output.strip():  # runs
            name, *arguments = shlex.split(command)
            assert name == "lightning-solo"
            done = run([sys.executable, "-m", "lightning_solo.cli", *arguments], folder)
            assert_printed(output, done.stdout + done.stderr)
        else:
            check(command)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if str(page) in REALLY_RUN], ids=str)
def test_commands_of_applications_run(page: Page, folder: Path) -> None:
    commands = [command for command, _ in page.commands() if command.startswith("python ")]
    assert commands
    for command in commands:
        done = run([sys.executable, *shlex.split(command)[1:]], folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


# --- tables, figures, names ---


def cells_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each table, without code, and the paragraph below it."""
    lines = text.splitlines()
    for match in re.finditer(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        below = text[match.end() :].lstrip("\n").partition("\n\n")[0]
        yield re.sub(r"`[^`]*`", "", match[0]), below
    assert lines


@each_page
def test_a_table_of_figures_has_its_command(page: Page) -> None:
    for table, below in cells_of(page.text):
        if MEASURED.search(table):
            (command,) = re.findall(r"Command: `([^`]+)`", below)
            check(command)


def test_a_table_without_its_command_is_noticed() -> None:
    table = "| a | b |\n| --- | --- |\n| x | 3.1 ms |\n"
    assert [bool(MEASURED.search(cells)) for cells, _ in cells_of(table)] == [True]
    assert [re.findall(r"Command: `", below) for _, below in cells_of(table + "\nSome words.\n")] == [[]]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples" / "results").glob("*.json")))
def test_each_file_of_results_is_a_table_with_its_command(name: str) -> None:
    if name == "orderings.json":
        pytest.skip("a list of tests that turned red, for those who change streams")
    text = TABLES.results(name)
    (command,) = re.findall(r"Command: `([^`]+)`", text)
    check(command.replace(" --only <part>", ""))
    assert text.splitlines()[1].startswith("| ---")
    for block in text.split("\n\n"):
        assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) <= 1
    assert any(f"```{{results}} {name}" in page.text for page in PAGES)


def test_a_technique_has_its_page_that_starts_from_its_card() -> None:
    pages = {path.stem for path in (DOCS / "techniques").glob("*.md")} - {"index"}
    assert pages == set(built_in_cards())
    for name in pages:
        text = (DOCS / "techniques" / f"{name}.md").read_text(encoding="utf-8")
        assert f"```{{card}} {name}\n" in text
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Use", "What it combines with", "Limits", "Figures"]
        assert built_in_cards()[name].class_name in TABLES.card(name)


@each_page
def test_paths_and_targets_that_it_names_exist(page: Page) -> None:
    for path in re.findall(r"`((?:examples|tests|docs(?!/_build)|lightning_solo)/[\w/.]+)`", page.text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(conf/(?:library|app)/[\w/.]+)`", page.text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([\w/.]+\.md)(?:#[\w-]+)?\)", page.text):
        assert (page.path.parent / target).is_file(), target
    for command in re.findall(r"`make (\w+)", page.text):
        check_make([command])
    for command in re.findall(r"`lightning-solo (\w+(?:-\w+)*)", page.text):
        assert command in COMMANDS, command


def settings_in(page: str, beginning: str) -> list[str]:
    """Return the names in the first column of a table of settings, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    table = text[text.index(beginning) :].partition("\n\n")[0]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]


def test_all_settings_of_sweeps_and_searches_are_explained() -> None:
    launcher = [field.name for field in fields(SoloLauncherConf) if not field.name.startswith("_")]
    assert settings_in("guides/sweeps.md", "| setting | default") == launcher
    sweeper = [field.name for field in fields(SoloOptunaSweeperConf) if not field.name.startswith("_")]
    assert sorted(settings_in("guides/sweeps.md", "| setting, below")) == sorted(sweeper)


def test_each_way_a_job_can_end_is_explained() -> None:
    text = (DOCS / "guides" / "sweeps.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z ]+)` \| [a-zA-Z]", text[: text.index("### The same")], re.MULTILINE) == [*STATUSES]


def test_each_technique_is_on_the_pages_that_list_them() -> None:
    pages = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("api", "presets", "limits")}
    presets = "".join(path.read_text(encoding="utf-8") for path in TABLES.PRESETS.glob("*.yaml"))
    for name, card in built_in_cards().items():
        assert f".. autoclass:: {card.class_name}\n" in pages["api"]
        if card.phase is not Phase.OBSERVE:
            assert name in presets or f"| [`{name}`](techniques/{name}.md) |" in pages["presets"]
            assert name in presets or f"](techniques/{name}.md)" in pages["limits"]


def test_each_preset_is_in_a_table_of_when_to_use_it() -> None:
    text = (DOCS / "presets.md").read_text(encoding="utf-8").partition("## All presets")[0]
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted([*named, "auto"]) == sorted(path.stem for path in TABLES.PRESETS.glob("*.yaml"))


def test_each_error_has_its_section() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert set(re.findall(r"^## (\w+Error)$", text, re.MULTILINE)) == kinds - {"SoloError"}


def test_doctests_of_the_tables() -> None:
    import doctest

    assert doctest.testmod(TABLES).failed == 0
