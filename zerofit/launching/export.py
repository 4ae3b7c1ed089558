"""Exports a checkpoint's weights, of any ZeRO stage or of FSDP2, in the format of from_pretrained()."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.checkpoints import (
    FSDP_WEIGHTS,
    MODEL_FOLDER,
    find_checkpoints,
    incomplete_checkpoint,
    inspect_checkpoint,
    is_checkpoint,
    noted_checkpoints,
    sharded_folders,
    tensor_parallel_size_of,
)
from zerofit.core.errors import UserError
from zerofit.core.upstream.checkpoint_pickles import loading_data_only

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONFIG = "config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files of a tokenizer or processor in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A written export."""

    checkpoint: Path
    """The checkpoint of the weights."""
    folder: Path
    """The output folder."""
    is_adapter: bool
    """True for adapters, which peft loads onto their base."""
    num_parameters: int
    """Elements written."""
    total_bytes: int
    """Their size."""


def export(source: Path, out: Path, *, trusts_checkpoint: bool = False) -> Exported:
    """Write a checkpoint's weights in the format of from_pretrained(), and verify them by loading.

    Args:
        source: a checkpoint, a folder of checkpoints, or a run folder.
        out: a new or empty folder.
        trusts_checkpoint: True to load a checkpoint whose files run code when they are loaded.

    Raises:
        UserError: there is no complete checkpoint, or its weights can't be exported.
    """
    checkpoint = _checkpoint(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            "export-folder-not-empty",
            "the output folder is not empty",
            found=f"--out {out}, which contains files",
            why="these might be overwritten, or mistaken for part of the model",
            fix="name a new folder",
        )
    model_config, adapter_config = (_described(checkpoint, name) for name in (_CONFIG, _ADAPTER_CONFIG))
    if model_config is None and adapter_config is None:
        raise _no_model(checkpoint, "it has neither config.json nor adapter_config.json")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with contextlib.nullcontext() if trusts_checkpoint else loading_data_only():
        weights = _weights(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    try:
        if adapter_config is not None:
            written = _write_adapter(checkpoint, adapter_config, model_config, weights, out)
        else:
            assert model_config is not None
            written = _write_model(model_config, weights, out)
    except BaseException:
        shutil.rmtree(out)
        raise
    for name in _TOKENIZER:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, out / name)
    _set_modes(out)
    return Exported(
        checkpoint=checkpoint,
        folder=out,
        is_adapter=adapter_config is not None,
        num_parameters=sum(tensor.numel() for tensor in written.values()),
        total_bytes=sum(tensor.nbytes for tensor in written.values()),
    )


def _set_modes(folder: Path) -> None:
    """Give files the mode that the umask leaves new ones; safetensors writes its own for the owner alone."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def _checkpoint(source: Path) -> Path:
    """Return the checkpoint: the given one, or the newest complete one."""
    if is_checkpoint(source):
        found = [inspect_checkpoint(source, digests=True)]
    else:
        noted = noted_checkpoints(source)
        found = [inspect_checkpoint(place, digests=True) for place in noted if place.is_dir()]
        found = found or list(find_checkpoints(source, digests=True))
    for checkpoint in found:
        if checkpoint.is_complete:
            return checkpoint.path
    if found:
        raise incomplete_checkpoint(found[0].path, found[0].problem or "")
    raise UserError(
        "no-checkpoint",
        "there is no checkpoint to export",
        found=str(source),
        why="it is neither a checkpoint, nor a folder of checkpoints, nor a run folder with one",
        fix="name a folder written by save_state() or Trainer, such as out/checkpoint-500",
    )


def _described(checkpoint: Path, name: str) -> Path | None:
    """Return the folder with a configuration file; Trainer writes an adapter's without its model's."""
    places = (checkpoint, checkpoint / MODEL_FOLDER)
    return next((place for place in places if (place / name).is_file()), None)


def _no_model(checkpoint: Path, found: str) -> UserError:
    return UserError(
        "export-without-model",
        "the checkpoint does not describe the model of its weights",
        found=f"{checkpoint}: {found}",
        why="from_pretrained() builds the model from config.json, which accelerate's checkpoints only "
        "have if `zerofit launch` saved them",
        fix=f"copy the model's config.json to {checkpoint / MODEL_FOLDER}, its class in `architectures`",
    )


def _weights(checkpoint: Path) -> dict[str, Any]:
    """Return the weights by name: DeepSpeed's fp32 master weights if there are any."""
    import torch

    _check_whole(checkpoint)
    if any(checkpoint.glob("*/*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):
            found = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    elif any(place.name.startswith(FSDP_WEIGHTS) for place in sharded_folders(checkpoint)):
        found = _joined_shards(checkpoint / f"{FSDP_WEIGHTS}_0")
    elif states := sorted(checkpoint.glob("*/mp_rank_00_model_states.pt")):  # ZeRO stage 0
        found = torch.load(states[0], map_location="cpu", weights_only=False)["module"]
    else:
        found = _plain_weights(checkpoint)
    if not found:
        raise _no_model(checkpoint, "it has no weights")
    return {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in found.items()}


def _check_whole(checkpoint: Path) -> None:
    """Check that each layer is complete in the checkpoint's shards."""
    size = tensor_parallel_size_of(path.name for path in checkpoint.glob("*/*_states.pt"))
    if size > 1:
        raise UserError(
            "export-of-cut-layers",
            "the weights of a tensor-parallel checkpoint can't be merged from its files",
            found=f"{checkpoint}: layers sharded over {size} ranks",
            why="DeepSpeed's zero_to_fp32 treats each rank's part as the whole layer",
            fix="resume with the same --tensor-parallel-size and make the script save its model, or copy "
            "the model.safetensors that Trainer wrote beside the shards",
        )


def _joined_shards(folder: Path) -> dict[str, Any]:
    """Return the whole weights of a folder of torch.distributed.checkpoint, as FSDP2 saves them."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".zerofit-export.") as place:
        whole = Path(place) / "weights.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            dcp_to_torch_save(folder, whole)
        state = torch.load(whole, map_location="cpu", weights_only=False)
    return dict(state["model"])


def _plain_weights(checkpoint: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        found |= load_file(path)
    for path in sorted(checkpoint.glob("pytorch_model*.bin")) if not found else ():
        found |= torch.load(path, map_location="cpu", weights_only=False)
    return found


def _base_config(checkpoint: Path, base: str | None) -> Any:
    """Return the configuration of an adapter's base model, which its own configuration names."""
    import transformers

    if not base:
        raise _no_model(checkpoint, "its adapter_config.json names no base model, and it has no config.json")
    try:
        return transformers.AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        found = f"the base model {base} of its adapter_config.json can't be read ({first[:200]})"
        raise _no_model(checkpoint, found) from error


def _empty_model(configs: Path, config: Any = None) -> Any:
    """Return a model without weights.

    Args:
        configs: the folder whose config.json describes it, unless a configuration is given.
        config: the configuration.
    """
    import torch
    import transformers

    config = config or transformers.AutoConfig.from_pretrained(configs)
    name = (config.architectures or [None])[0]
    model_class = getattr(transformers, name or "", None)
    if model_class is None:
        raise _no_model(configs, f"its config.json names the class {name}, which transformers does not have")
    with torch.device("meta"):
        return model_class(config)


def _write_model(configs: Path, weights: Mapping[str, Any], out: Path) -> dict[str, Any]:
    model = _empty_model(configs)
    model.save_pretrained(out, state_dict=dict(weights))
    if (configs / "generation_config.json").is_file():
        shutil.copyfile(configs / "generation_config.json", out / "generation_config.json")
    loaded, info = type(model).from_pretrained(out, dtype="auto", output_loading_info=True)
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    _check_equal(loaded.state_dict(), weights, wrong)
    return dict(loaded.named_parameters())


def _write_adapter(
    checkpoint: Path, configs: Path, model_config: Path | None, weights: Mapping[str, Any], out: Path
) -> dict[str, Any]:
    """Write an adapter's weights.

    Args:
        configs: the folder of adapter_config.json.
        model_config: the folder of its base model's config.json; None if only the base model has one.
    """
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file, save_file

    adapter = PeftConfig.from_pretrained(str(configs))
    named_base = None if model_config else _base_config(checkpoint, adapter.base_model_name_or_path)
    model = get_peft_model(_empty_model(model_config or checkpoint, named_base), adapter)
    prefix = "base_model.model."
    named = {name if name.startswith(prefix) else f"{prefix}{name}": value for name, value in weights.items()}
    own = get_peft_model_state_dict(model, state_dict=named)
    expected = get_peft_model_state_dict(model)
    save_file({name: value.contiguous() for name, value in own.items()}, out / "adapter_model.safetensors")
    adapter.save_pretrained(str(out))
    loaded = load_file(out / "adapter_model.safetensors")
    missing = sorted(set(expected) - set(loaded))
    _check_equal(loaded, own, {"missing_keys": missing} if missing else {})
    return loaded


def _check_equal(loaded: Mapping[str, Any], weights: Mapping[str, Any], wrong: Mapping[str, Any]) -> None:
    """Check that the written weights load and equal the saved ones bit by bit."""
    import torch

    differing = [
        name for name, value in weights.items() if name in loaded and not torch.equal(loaded[name], value)
    ]
    if differing or wrong:
        found = (
            f"{differing[0]} differs" if differing else "; ".join(f"{k}: {v[:3]}" for k, v in wrong.items())
        )
        raise UserError(
            "export-differs",
            "the exported weights differ after loading",
            found=found,
            why="config.json does not describe the trained model",
            fix="name the checkpoint of this model, or correct its config.json",
            exit_code=1,
        )
