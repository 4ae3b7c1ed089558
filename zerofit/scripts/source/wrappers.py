"""Attributes of prepared models that a wrapper lacks, unless the script looks for a wrapper itself."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action, ModelState
from zerofit.scripts.source.reading import ContextEffect
from zerofit.scripts.source.values import ObjectKind

if TYPE_CHECKING:
    from zerofit.scripts.source.reading import Reading
    from zerofit.scripts.source.values import TrackedObject

_WRAPPER_WORDS = """
    T_destination add_module apply bfloat16 broadcast_buffers buffers call_super_init children compile cpu
    cuda double dump_patches eval extra_repr float forward gather get_buffer get_extra_state get_parameter
    get_submodule half ipu join join_device join_hook join_process_group load_state_dict modules mtia
    named_buffers named_children named_modules named_parameters no_sync parameters register_backward_hook
    register_buffer register_comm_hook register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
    register_state_dict_pre_hook requires_grad_ scatter set_extra_state set_submodule share_memory state_dict
    to to_empty to_kwargs train type will_sync_module_buffers xpu zero_grad
    module training device device_ids output_device dim process_group device_mesh logger reducer
    find_unused_parameters gradient_as_bucket_view static_graph require_backward_grad_sync
    require_forward_param_sync is_multi_device_module mixed_precision parameters_to_ignore
    """
WRAPPER_ATTRIBUTES = frozenset(_WRAPPER_WORDS.split())
"""Public attributes of torch's DistributedDataParallel, which forwards no others to its model."""
_LOOKS_FOR_WRAPPER = re.compile(r"hasattr|isinstance|num_processes|world_size|distributed|multi_?gpu|n_gpu")
"""Words of conditions by which a script tells a wrapped model from a plain one."""


def note_attribute(reading: Reading, owner: TrackedObject, node: ast.Attribute) -> None:
    """Record an attribute of a prepared model that only the model inside has."""
    if owner.kind is not ObjectKind.MODEL or owner.state is not ModelState.ENGINE or owner.is_in_pipeline:
        return
    if (
        node.attr.startswith("_")
        or node.attr in WRAPPER_ATTRIBUTES
        or ContextEffect.GUARDED in reading.within
    ):
        return
    tests = (ast.unparse(condition.test) for condition in reading.conditions)
    if not any(map(_LOOKS_FOR_WRAPPER.search, tests)):
        reading.record(Action.USE_WRAPPED, node, owner)
