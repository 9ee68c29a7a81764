"""DeepSpeed has the private names that two files alone use, and each patch states the fault it mends."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import FunctionType

import pytest

from lightning_solo.zero import deepspeed_internals, deepspeed_patches

pytest.importorskip("deepspeed", reason="listed on Linux only")
ROOT = Path(__file__).parents[2]
HERE = [Path(str(module.__file__)) for module in (deepspeed_internals, deepspeed_patches)]
# file of DeepSpeed -> the names that the two files use of it; after an upgrade, what to look at
NAMES = {
    "comm/comm.py": "cdb",
    "comm/torch.py": "build_shm_op",
    "git_version_info.py": "accelerator_name installed_ops",
    "ops/op_builder/builder.py": "_loaded_ops",
    "runtime/engine.py": "DeepSpeedEngine _broadcast_model ds_optim_param",
    "runtime/swap_tensor/optimizer_utils.py": "_adjust_for_misaligned_lengths numel_alignment",
    "runtime/swap_tensor/partitioned_optimizer_swapper.py": "swap_out_gradients",
    "runtime/swap_tensor/partitioned_param_swapper.py": "param_id_to_buffer_id"
    " remove_partition_and_release_buffers swap_in synchronize_reads",
    "runtime/zero/config.py": "DeepSpeedZeroConfig",
    "runtime/zero/linear.py": "zero3_linear_wrap",
    "runtime/zero/parameter_offload.py": "FWD_MODULE_STACK _external_params _in_forward _original_parameters"
    " applied_pre_backward_ref_cnt is_external_param partition_all_parameters",
    "runtime/zero/partition_parameters.py": "_convert_to_deepspeed_param _exit _partition_params"
    " _params_to_partition _record_deferred_updates _zero_init_param ds_id ds_shape ds_status nvme_swapper"
    " src_rank",
    "runtime/zero/stage3.py": "_get_fp32_opt_state_partition _get_param_partition_rank"
    " _optimizer_states_and_gradient_swap_in _release_swap_buffers"
    " _swappable_optimizer_subgroup _writeback_swap_state _z3_optimizer fp16_groups fp32_partitioned_groups_flat"
    " grad_position master_weights_and_grads_dtype optimizer_swapper parameter_offload swap_optimizer",
    "runtime/zero/stage_1_and_2.py": "_hp_mapping accumulated_grads_in_cpu bit16_groups get_param_id grad_accum"
    " offload_gradient_dict param_buffer_of_bit16_for_cpu_offload_groups param_idx_in_group"
    " single_partition_of_fp32_groups",
    "utils/groups.py": "_release_process_group_references",
    "utils/mixed_precision_linkage.py": "_dp_group _index_in_param_group",
    "utils/tensor_fragment.py": "get_hp_fragment_address",
}
EVERY = {name for names in NAMES.values() for name in names.split()}
ELSEWHERE = {"optimizer_swapper", "_exit"}  # an argument of `make_engine`, and `os._exit`
TORCHS = {"_parameters", "_forward_hooks", "_forward_pre_hooks", "_wrapped_by_lr_sched", "_opt_called"}
MANGLED = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
HELPERS = {"split_aligned"}  # parts of a patch


def names_in(path: Path) -> set[str]:
    """Return the attributes, and the strings that could name one, in a file's code."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | strings


@pytest.mark.parametrize("file", NAMES)
def test_deepspeed_has_the_names(file: str) -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    source = (Path(str(spec.origin)).parent / file).read_text(encoding="utf-8")
    missing = [name for name in NAMES[file].split() if not re.search(rf"\b{name}\b", source)]
    assert missing == []


def test_the_names_are_those_that_are_used() -> None:
    used = set().union(*map(names_in, HERE))
    assert EVERY - used == set()
    private = {name for name in used if re.fullmatch(r"_[a-z]\w+|ds_\w+", name)}
    assert private - EVERY - TORCHS == set()
    assert MANGLED in used


def test_no_other_file_names_them() -> None:
    for path in sorted((ROOT / "lightning_solo").rglob("*.py")):
        if path not in HERE:
            named = names_in(path) & (EVERY | {MANGLED}) - ELSEWHERE
            assert not named, f"{path} names {named}: DeepSpeed's private names stand in zero/deepspeed_internals.py"


@pytest.mark.parametrize("name", sorted(vars(deepspeed_patches)))
def test_each_patch_states_fault_version_undoing_and_test(name: str) -> None:
    patch = vars(deepspeed_patches)[name]
    ours = inspect.getmodule(patch) is deepspeed_patches and isinstance(patch, FunctionType)
    if not ours or name.startswith("_") or name in HELPERS:
        return
    stated = dict(re.findall(r"^ {4}(Fault|Seen|Undone|Test): (.+)$", str(patch.__doc__), re.MULTILINE))
    assert list(stated) == ["Fault", "Seen", "Undone", "Test"]
    assert re.match(r"\d+\.\d+\.\d+[.;]", stated["Seen"])
    file, _, test = stated["Test"].partition("::")
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
