"""Each module of the package has a test file of its name, or is listed here with the file that tests it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from lightning_solo.cards.catalogue import built_in_cards
from tests.test_architecture import FILES, PACKAGE, ROOT, imports

TESTS = ROOT / "tests"
ELSEWHERE = {
    "cards/test_lightning_callbacks.py": "cards/configuration",
    "cli/test_command_line.py": "cli/application cli/hydra_section cli/presets cli/show",
    "cli/test_ladder.py": "cli/ladder_line cli/options",
    "cli/test_plan.py": "cli/plan_display cli/plan_line report/plan_chart cli/plan_largest",
    "cli/test_predict.py": "cli/trained_run",
    "cli/test_quantized_run.py": "cli/comparison",
    "cli/test_train.py": "cli/run_folder",
    "contract/test_cards.py": "cards/arguments cards/catalogue",
    "contract/test_engines.py": "cards/engines",
    "contract/test_own_technique.py": "cli/doctor",
    "contract/test_pairs.py": "cards/phase",
    "data/test_splitting.py": "data/loss_weights",
    "export/test_conversion.py": "cli/convert",
    "export/test_soft_labels.py": "cli/soft_labels",
    "export/test_graphs.py": "cli/export_graph export/trained_weights",
    "export/test_pruned.py": "cli/pruned_run export/sparse_weights",
    "export/test_weights.py": "cli/export export/formats export/sources optim/checkpoint_masters",
    "export/test_pretrained.py": "export/adapter_folder export/few_bits export/generation_files export/gguf"
    " export/trained_models",
    "fine_tuning/test_chat.py": "fine_tuning/data_report fine_tuning/mapped_rows",
    "fine_tuning/test_auto_model.py": "fine_tuning/labelled",
    "fine_tuning/test_causal_lm.py": "fine_tuning/from_folder",
    "fine_tuning/test_conversations.py": "fine_tuning/messages",
    "fine_tuning/test_new_tokens.py": "nn/embedding_rows",
    "fine_tuning/test_trained.py": "cli/generate",
    "kernels/test_adamw_triton.py": "optim/adamw_triton optim/kernels optim/triton_launches",
    "kernels/test_liger.py": "nn/fused_operators nn/liger",
    "kernels/test_optimizers.py": "optim/gpu_kernel optim/operator_kernels",
    "ladder/test_ladder.py": "ladder/display ladder/figures ladder/measurement ladder/rungs",
    "memory/test_leaks.py": "memory/census memory/holders",
    "memory/test_ledger.py": "memory/events memory/module_names",
    "nn/test_activation_budget.py": "nn/saved_tensors",
    "nn/test_adaptation.py": "nn/adapted nn/adapter_merging nn/adapter_targets nn/adapter_weights",
    "nn/test_quantized.py": "bitsandbytes_operators",
    "optim/test_back_ends.py": "optim/back_end_facts optim/library_optimizers",
    "optim/test_compact_adamw.py": "optim/adamw_update optim/gradient_checks optim/memory_order optim/param_groups",
    "optim/test_conversion.py": "optim/replacement",
    "optim/test_sharded_states.py": "memory/sharded_tensors",
    "optim/test_gradient_release.py": "optim/gradient_sums optim/immediate_steps",
    "optim/test_host_memory.py": "memory/host_slabs optim/adamw_states optim/staging optim/state_placement",
    "optim/test_master_weights.py": "optim/split_optimizer optim/torch_optimizers",
    "optim/test_small_optimizers.py": "optim/muon optim/one_by_one optim/schedule_free",
    "optim/test_optimizer_database.py": "optim/adamw_state_dict optim/device_steps",
    "planner/test_allocator.py": "planner/replay",
    "planner/test_cuda_rules.py": "planner/attention planner/optimizer_rules",
    "planner/test_auto.py": "planner/bases presets/writing",
    "planner/test_calibrate.py": "planner/calibration",
    "planner/test_device.py": "presets/devices",
    "planner/test_few_blocks.py": "planner/depth_scaling planner/equal_blocks",
    "planner/test_habits.py": "planner/batches",
    "planner/test_kernels.py": "planner/autocast planner/index_bounds planner/rules cards/tracing",
    "planner/test_plan.py": "planner/preset_plans planner/table",
    "planner/test_solved_plan.py": "planner/block_marks planner/block_tables",
    "planner/test_timeline.py": "planner/step_time planner/tracer",
    "presets/test_compose.py": "presets/files presets/overrides presets/parse",
    "presets/test_signature.py": "presets/registry",
    "report/test_page.py": "report/model report/palette report/pictures report/write",
    "report/test_run_folder.py": "report/figures report/step_times",
    "report/test_sweep_folder.py": "report/charts",
    "seams/test_techniques.py": "seams/strategy seams/technique",
    "simcuda/test_orderings.py": "memory/weight_ring nn/host_weights",
    "sweeps/test_gpus.py": "sweeps/ranks",
    "sweeps/test_jobs.py": "atomic_files sweeps/job_process",
    "sweeps/test_optuna.py": "sweeps/pruning",
    "sweeps/test_optuna_space.py": "sweeps/search sweeps/search_settings sweeps/search_space sweeps/study",
    "sweeps/test_server.py": "sweeps/files",
    "techniques/test_gradient_release.py": "cards/released_gradients seams/released_gradients",
    "techniques/test_inplace.py": "nn/inplace",
    "techniques/test_weight_averaging.py": "export/members optim/averages",
    "techniques/test_adapters.py": "export/adapter_files",
    "techniques/test_layer_freezing.py": "nn/freezing optim/group_division",
    "techniques/test_optimizer_replacement.py": "seams/averaged_weights",
    "nn/test_structure.py": "nn/structure_checks nn/structure_search",
    "techniques/test_pruning.py": "nn/prunable optim/weight_masks",
    "techniques/test_pruning_structure.py": "export/pruned_structure",
    "techniques/test_low_rank.py": "cards/factors nn/factorized_layers nn/factorizing seams/factors",
    "techniques/test_quantization.py": "nn/fake_quantization",
    "techniques/test_shared_blocks.py": "nn/sharing",
    "techniques/test_quantized_base.py": "nn/quantizable",
    "techniques/test_activation_checkpointing.py": "cards/blocks nn/recomputation",
    "techniques/test_activation_checkpointing_budget.py": "cards/budget",
    "techniques/test_activation_offloading.py": "nn/offloading",
    "techniques/test_activation_offloading_disk.py": "nn/disk_offloading nn/scratch_file",
    "techniques/test_attention.py": "nn/attention_kernels",
    "techniques/test_curriculum.py": "data/curriculum_batches",
    "techniques/test_block_micro_batching.py": "nn/graph_nodes",
    "techniques/test_distillation.py": "export/teachers nn/divergence nn/teacher",
    "techniques/test_exact_resume.py": "data/changing_attributes data/item_states data/replay data/replayed_loaders"
    " data/worker_states",
    "techniques/test_ddp.py": "seams/engines",
    "techniques/test_fsdp.py": "nn/sharding",
    "techniques/test_zero_offload.py": "seams/zero_strategy",
    "techniques/test_fused_kernels.py": "nn/fused_kernels",
    "techniques/test_item_cache.py": "data/item_cache",
    "techniques/test_layer_drop.py": "nn/layer_drop",
    "techniques/test_length_bucketing.py": "cards/lengths data/item_lengths data/length_batches data/loaders",
    "techniques/test_low_precision_matmul.py": "nn/low_precision",
    "techniques/test_memory_logger.py": "memory/category_peaks",
    "techniques/test_micro_batching.py": "data/micro_batches optim/noise_scale",
    "techniques/test_micro_batching_losses.py": "nn/split_parity",
    "techniques/test_safe_checkpoint.py": "checkpoint/plain checkpoint/snapshot",
    "techniques/test_prefetch.py": "data/prefetch",
    "techniques/test_regional_compilation.py": "nn/compilation",
    "techniques/test_throughput.py": "data/batch_size",
    "techniques/test_tiled_mlp.py": "nn/tiling",
    "test_attach.py": "callbacks",
    "test_fitting.py": "cards/footprint memory/sizes",
    "test_build.py": "presets/targets requirements",
    "test_docs.py": "errors",
    "test_guard.py": "optim/window_gradients",
    "zero/test_engine.py": "zero/changes zero/deepspeed_patches zero/refusals zero/run",
    "zero/test_host_optimizer.py": "zero/flat",
    "zero/test_layout.py": "zero/budget",
    "zero/test_module.py": "zero/deepspeed_internals",
}
"""Test file -> the modules that it tests without having their name."""


def module_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def mirrors(module: str) -> list[Path]:
    """Return the test files that have the name of a module: of a technique's, the technique's first."""
    room, *rest = module.split("/")
    if room == "techniques":
        return [*(TESTS / room).glob(f"test_{rest[0]}.py"), *(TESTS / room).glob(f"test_{'_'.join(rest)}.py")]
    path = TESTS / room / f"test_{rest[-1]}.py" if rest else TESTS / f"test_{room}.py"
    return [path] if path.is_file() else []


@cache
def file_of(name: str) -> Path | None:
    """Return the file of a module of the package, by its dotted name."""
    if not name.startswith("lightning_solo."):
        return None
    path = ROOT / name.replace(".", "/")
    return next((file for file in (Path(f"{path}.py"), path / "__init__.py") if file.is_file()), None)


@cache
def strings(path: Path) -> set[str]:
    """Return the words of a file's strings."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {word for text in texts for word in text.split()}


@cache
def reached(path: Path, arrows: int) -> set[Path]:
    """Return the files of the package that a file imports, some by their names in a string, or over other files."""
    names = imports(path, top_level=False) | strings(path)
    files = {file for name in names if (file := file_of(name)) is not None}
    return files.union(*(reached(file, arrows - 1) for file in files)) if arrows > 1 else files


def exercises(test: Path, module: str) -> bool:
    """Return whether a test file imports a module, over two others, uses the facade, or runs it as a command."""
    room, _, command = module.rpartition("/")
    by_command = room == "cli" and command in strings(test)
    by_facade = not room and "lightning_solo" in imports(test, top_level=False)
    return by_command or by_facade or PACKAGE / f"{module}.py" in reached(test, 3)


LISTED = {module: test for test, modules in ELSEWHERE.items() for module in modules.split()}
MODULES = [module_of(path) for path in FILES if path.name not in ("__init__.py", "__main__.py", "card.py")]


def test_a_module_has_a_test_file_of_its_name_or_is_listed_with_another() -> None:
    wrong = []
    for module in MODULES:
        own = [path for path in mirrors(module) if exercises(path, module)]
        test = TESTS / LISTED.get(module, "")
        if module in LISTED and own:
            wrong.append(f"{module} has {own[0]}: remove it from the list")
        elif module in LISTED and not (test.is_file() and exercises(test, module)):
            wrong.append(f"{LISTED[module]} does not import {module}")
        elif module not in LISTED and not own:
            wrong.append(f"write tests/<room>/test_<module>.py for {module}, or list the file that tests it")
    assert not wrong


def test_the_list_names_only_modules_that_exist() -> None:
    assert set(LISTED) <= set(MODULES)
    assert sum(len(modules.split()) for modules in ELSEWHERE.values()) == len(LISTED), "a module is listed twice"


def test_each_technique_has_a_test_file_of_its_name() -> None:
    """Cards themselves are tested all alike, in contract/test_cards.py."""
    for card in built_in_cards().values():
        assert mirrors(f"techniques/{card.name}/technique")
