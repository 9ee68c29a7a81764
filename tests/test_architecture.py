"""The layers of the house, read from the imports; and what importing the package costs in modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lightning_solo.cards.catalogue import built_in_cards

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_solo"
LEVELS = {
    "atomic_files": 0,
    "checkpoint": 0.9,
    "attributes": 0,
    "bitsandbytes_operators": 0.1,
    "cpp_builds": 0.1,
    "errors": 0,
    "machine": 0,
    "out_of_memory": 0.1,
    "processes": 0.1,
    "random_states": 0.1,
    "secret_values": 0,
    "signals": 0,
    "tables": 0.1,
    "units": 0,
    "cards": 0.8,
    "presets": 1.2,
    "data": 0.95,  # below modules, which take nested batches
    "memory": 0.9,  # below the optimizers and modules that keep tensors on the host
    "nn": 1,
    "optim": 1,
    "zero": 1.5,  # an engine of its own, which steps optimizers
    "seams": 1.8,
    "export": 1.9,  # reads what techniques save, and knows none of them
    "prediction": 2,
    "techniques": 2,
    "planner": 4,
    "sweeps": 4,
    "ladder": 4.5,
    "reference": 2,
    "fine_tuning": 2.1,  # reads the text of `reference`
    "guard": 2,
    "fitting": 2,
    "requirements": 1.5,
    "build": 3,
    "report": 5,
    "attach": 5,
    "trainers": 5.1,
    "lightning_cli": 5.2,
    "callbacks": 2,
    "cli": 6,
}
HEAVY = {"torch", "lightning", "pytorch_lightning", "torchmetrics", "deepspeed", "transformers"}
LATE = {
    "deepspeed",
    "torchao",
    "peft",
    "bitsandbytes",
    "flashoptim",
    "liger_kernel",
    "transformers",
    "tensorboard",
    "altair",
    "vl_convert",
    "jinja2",
    "pyarrow",
    "safetensors",
    "datasets",
    "tokenizers",
    "onnx",
    "onnxscript",
    "onnxruntime",
}
BACK_END_FACTS = "lightning_solo.optim.back_end_facts"  # without torch: presets are checked against them
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path, *, top_level: bool) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_imports_go_downwards() -> None:
    for path in FILES:
        for name in imports(path, top_level=False):
            if room(path) == "presets" and name.startswith(BACK_END_FACTS):
                continue
            if name.startswith("lightning_solo.") and (other := name.split(".")[1]) in LEVELS and other != room(path):
                assert LEVELS[other] < LEVELS[room(path)], f"{path} imports {name}"


def test_siblings_among_techniques_do_not_know_one_another() -> None:
    for path in FILES:
        for name in imports(path, top_level=False):
            parts = name.split(".")
            if room(path) == "techniques" and parts[:2] == ["lightning_solo", "techniques"] and len(parts) > 2:
                assert parts[2] == path.parent.name, f"{path} imports {name}; what both need moves to a room below"


def test_each_room_imports_only_what_it_may() -> None:
    for path in FILES:
        roots = {name.split(".")[0] for name in imports(path, top_level=False)}
        top = {name.split(".")[0] for name in imports(path, top_level=True)}
        assert not top & LATE, f"{path}: heavy optional packages are imported inside the function that needs them"
        if room(path) in ("cards", "presets") or path.name in ("card.py", "back_end_facts.py"):
            assert not roots & HEAVY, f"{path}: presets are checked without torch"
        if room(path) in ("data", "memory", "nn"):
            assert not roots & (HEAVY - {"torch", "transformers"}), f"{path}: mechanisms stand on plain torch"
        if room(path) == "zero":
            assert not roots & (HEAVY - {"torch", "deepspeed"}), f"{path}: only plain torch, and DeepSpeed's C++"
        if room(path) in ("build", "attach", "cli"):
            assert not top & HEAVY, f"{path}: a typo is found before torch is imported"


# Objects of Lightning, by the names that the package gives them -> an attribute with a private name.
PRIVATE = re.compile(
    r"\b(trainer|strategy|precision|precision_plugin|fit_loop|epoch_loop|loop|automatic_optimization|\w*connector)\._(?!target_)[a-z]\w*"
    r"|core\.optimizer\"\)\._"
)


def test_private_names_of_lightning_stand_in_two_files() -> None:
    uses = {path for path in FILES if PRIVATE.search(path.read_text(encoding="utf-8"))}
    assert uses == {PACKAGE / "seams" / "patches.py", PACKAGE / "seams" / "resuming.py"}


# File or room -> what it has in common with a technique's word or class, without being about the technique.
WORDS_IN_COMMON = {
    "cards/engines.py": {"ddp", "fsdp", "zero3"},  # the engines' names, which their strategies have
    "cards/lightning_callbacks.py": {"AccumulationSchedule"},  # a remedy: what to write
    "cli/train.py": {"throughput"},  # the application's own choice of an observer
    "export/teachers.py": {"Distillation"},  # a remedy: what to write
    "data/item_cache.py": {"item_cache"},  # the file's name
    "data/prefetch.py": {"prefetch"},  # the thread's name
    # the mechanism's function; torch's modules; its argument
    "nn": {"chunked_cross_entropy", "attention", "inplace", "fsdp"},
    "optim": {"gradient_release"},  # the module of the mechanism
    "memory/segments.py": {"memory_snapshot"},  # torch's function
    # the operator, which is traced by its fused kernel or by products; the module that simulates CUDA's
    "planner": {"attention", "allocator"},
    "reference/byte_gpt.py": {"attention", "Attention"},  # a layer
    # what to write in the place of an old name
    "presets/old_spellings.py": {"compact_states", "gradient_release", "CompactStates", "GradientRelease"},
    "report/run_folder.py": {"throughput", "Throughput"},  # name and title of a chart
    "seams/engines.py": {"ddp", "fsdp", "zero3", "ZeroOffloadStrategy"},  # Lightning's strategies by the engines' names
    "seams/zero_strategy.py": {"zero_offload"},  # a key of checkpoints
    "seams/released_gradients.py": {"gradient_release"},  # the module of the mechanism
    "seams/run.py": {"gradient_release"},  # the module of the mechanism
    "sweeps": {"pruning", "Pruning"},  # of trials, as Optuna calls it
    "zero/refusals.py": {"zero_offload"},
    "zero/config.py": {"activation_checkpointing"},  # a section of DeepSpeed's configuration
}


def words_of(path: Path) -> Iterator[str]:
    """Yield the identifiers of a file, its string constants, and the words of these that begin in upper case."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for name in ("id", "attr", "arg", "name", "asname", "module"):
            yield from str(getattr(node, name, None) or "").split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            yield from re.findall(r"\b[A-Z]\w+", node.value)


def test_no_file_outside_its_folder_names_a_technique() -> None:
    names = {name for card in built_in_cards().values() for name in (card.name, card.class_name)}
    found: dict[str, set[str]] = {}
    for path in [PACKAGE / "__init__.py", *FILES]:
        if room(path) != "techniques" and (named := names & set(words_of(path))):
            file = str(path.relative_to(PACKAGE))
            found.setdefault(room(path) if room(path) in WORDS_IN_COMMON else file, set()).update(named)
    assert found == WORDS_IN_COMMON, "what others need to know of a technique stands in its card"


SENTENCE = re.compile(r"(?:\b[A-Za-z']+[,;:]? ){4}[A-Za-z]+")


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the string constants in an expression, but for reasons and names of a parametrization."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.keyword) and child.arg in ("id", "reason")):
            yield from strings(child)


def looked_for(path: Path) -> Iterator[str]:
    """Yield what the tests of a file look for: in assertions, `pytest.raises` and its like, and parametrizations."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Assert(test=expected) | ast.withitem(context_expr=expected):
                yield from strings(expected)
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[_, expected, *_]):
                yield from strings(expected)


def test_tests_look_for_class_option_and_remedy_and_for_no_sentence() -> None:
    """A better sentence in a message breaks no test: none looks for more than four plain words in a row."""
    files = (ROOT / "tests").rglob("*.py")
    sentences = [f"{path.name}: {text}" for path in files for text in looked_for(path) if SENTENCE.search(text)]
    assert not sentences, "write tests.messages.mentions(option, remedy)"


def test_every_file_says_first_what_it_is_for() -> None:
    for path in [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"


def test_no_room_is_unknown() -> None:
    assert {room(path) for path in FILES} <= set(LEVELS)


@pytest.mark.parametrize(
    "module",
    [
        "lightning_solo",
        "hydra_plugins.lightning_solo.search_path",
        "lightning_solo.cli",
        "lightning_solo.cli.plan",
        BACK_END_FACTS,
    ],
)
def test_importing_is_light(module: str) -> None:
    code = f"import sys, {module}; found = {HEAVY!r} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_facade_alone_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import lightning_solo\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "assert new == {'lightning_solo'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_facade_names_all_it_promises() -> None:
    import lightning_solo

    for name in lightning_solo.__all__:
        assert getattr(lightning_solo, name) is not None
