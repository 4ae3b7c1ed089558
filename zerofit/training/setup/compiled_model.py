"""Makes a model compiled by the plan save, load and unwrap like the script's own.

torch.compile wraps a model, which prefixes weight names by `_orig_mod.`. A script that does not know this
would save these names, and loading such a file leaves every weight newly initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_PREFIX = "_orig_mod."
"""Source: torch/_dynamo/eval_frame.py, OptimizedModule (2.13)."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Keep the names of weights when prepare_model() compiles, and unwrap the compiled model, too."""
    if not settings.strategy.compile:
        return {}

    def prepare_model(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, model, *args, **kwargs)
        if _is_wrapper(prepared) and not _is_wrapper(model):
            _keep_names(prepared)
        return prepared

    def unwrap_model(
        original: Any, self: Any, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> Any:
        return original(self, model, keep_fp32_wrapper, keep_torch_compile)

    return {"prepare_model": prepare_model, "unwrap_model": unwrap_model}


def _is_wrapper(model: Any) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(model, OptimizedModule)


def _keep_names(wrapper: Any) -> None:
    """Make a wrapper's state_dict() use the names of the wrapped model, and load_state_dict() accept them."""

    def without_prefix(_: Any, state: Any, prefix: str, __: Any) -> None:
        for name in [name for name in state if name.startswith(prefix + _PREFIX)]:
            state[prefix + name.removeprefix(prefix + _PREFIX)] = state.pop(name)

    def with_prefix(_: Any, state: Any, prefix: str, *__: Any) -> None:
        own = [name for name in state if name.startswith(prefix)]
        for name in own:
            if not name.startswith(prefix + _PREFIX):
                state[prefix + _PREFIX + name.removeprefix(prefix)] = state.pop(name)

    wrapper.register_state_dict_post_hook(without_prefix)
    wrapper.register_load_state_dict_pre_hook(with_prefix)
