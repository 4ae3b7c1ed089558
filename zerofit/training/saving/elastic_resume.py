"""Makes DeepSpeed resume a checkpoint with another number of ranks, ZeRO stage or offload.

DeepSpeed's ds_to_universal converts a copy into one folder per parameter, which load_universal reads. What it
omits is added: step counts, settings of parameter groups, frozen parameters and buffers.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.checkpoints import SavedLayout, incomplete_checkpoint, inspect_checkpoint, read_shards
from zerofit.core.errors import UserError
from zerofit.core.upstream.checkpoint_pickles import UNTRUSTED, untrusted_checkpoint
from zerofit.core.upstream.deepspeed import base_optimizer, reading_universal
from zerofit.training.saving.checkpoints import gather, layout_of, rank_of_process

if TYPE_CHECKING:
    from zerofit.core.facts import Checkpoint
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_COPY = ".zerofit-converted."
"""Prefix of the converted copy beside the checkpoint, which is deleted after loading."""
_DONE, _REST = "done", "rest.pt"
_POLL_S = 0.2
_HYPERPARAMETERS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""Settings of a parameter group that schedulers or scripts change; others define its computation."""


def engine_wrappers(engine_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Convert checkpoints that DeepSpeedEngine.load_checkpoint can't read directly."""

    def load_checkpoint(
        original: Any, self: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        folder = Path(load_dir)
        tag = tag or _latest(folder)
        if tag is None and any(folder.glob("*/*_states.pt")):
            raise incomplete_checkpoint(folder, "the file `latest`, which DeepSpeed writes last, is missing")
        weights_only = kwargs.get("load_module_only") or not kwargs.get("load_optimizer_states", True)
        if tag is None or weights_only or args or not self.zero_optimization():
            return original(self, load_dir, tag, *args, **kwargs)
        shards = read_shards(str(folder), str(tag)) if (folder / str(tag)).is_dir() else None
        if shards is None or shards.num_ranks == 0 or shards.is_universal:
            return original(self, load_dir, tag, *args, **kwargs)
        saved, now = _saved_layout(folder, shards), layout_of(settings, self.optimizer)
        _check_groups(folder, shards.tensor_parallel_size, settings.tensor_parallel_size)
        differences = _differences(saved, now, stage=int(self.zero_optimization_stage()))
        if self.zero_nvme_offload_optimizer():
            raise _refused(
                folder, "optimizer states on NVMe", "DeepSpeed can't load optimizer states from there"
            )
        if not differences:
            return original(self, load_dir, tag, *args, **kwargs)
        _check_convertible(folder, saved, now)
        copy = folder.parent / f"{_COPY}{folder.name}.{gather(os.getpid())[0]}"  # two runs may resume it
        _convert_together(folder, str(tag), copy, keeps=_kept_names(self.module))
        try:
            with reading_universal(self):
                found = _load(self, copy, str(tag), lambda: original(self, str(copy), tag, **kwargs))
        finally:
            gather(None)
            if rank_of_process() == 0:
                shutil.rmtree(copy, ignore_errors=True)
        changes.add(f"{folder.name} was converted in a copy: it was saved with {', '.join(differences)}")
        return found

    return {"load_checkpoint": load_checkpoint}


def _latest(folder: Path) -> str | None:
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _saved_layout(folder: Path, shards: Checkpoint) -> SavedLayout:
    """Return a checkpoint's layout, inferred from its files if it has no manifest."""
    manifest = inspect_checkpoint(folder).manifest
    return SavedLayout(
        engine="deepspeed",
        world_size=shards.num_ranks,
        zero_stage=3 if shards.partitions_parameters else manifest.layout.zero_stage if manifest else 2,
        optimizer_offload=manifest.layout.optimizer_offload if manifest else "none",
        optimizer=manifest.layout.optimizer if manifest else None,
    )


def _differences(saved: SavedLayout, now: SavedLayout, *, stage: int) -> list[str]:
    """Return the differences between layouts that DeepSpeed can't load directly."""
    found = []
    if saved.world_size != now.world_size:
        found.append(f"{saved.world_size} rank{'s' * (saved.world_size > 1)}")
    if (saved.zero_stage == 3) is not (stage == 3):
        found.append(f"ZeRO-{saved.zero_stage}")
    if saved.optimizer is not None and saved.optimizer != now.optimizer:
        found.append(saved.optimizer)
    return found


def _check_convertible(folder: Path, saved: SavedLayout, now: SavedLayout) -> None:
    for layout in (saved, now):
        if not layout.is_of_adam:
            raise _refused(
                folder,
                f"saved with {saved.optimizer}, resumed with {now.optimizer}",
                "DeepSpeed's converter only supports the states of Adam and AdamW",
            )


def _check_groups(folder: Path, saved: int, now: int) -> None:
    if saved != now:
        found = f"saved with tensor parallelism over {saved} rank{'s' * (saved > 1)}, resumed with {now}"
        raise _refused(folder, found, "DeepSpeed's converter can't reshard layers")


def _refused(folder: Path, found: str, why: str) -> UserError:
    return UserError(
        "checkpoint-not-convertible",
        "the checkpoint has another layout than this run, and can't be converted",
        found=f"{folder}: {found}",
        why=why,
        fix="resume with the number of ranks, ZeRO stage, offload and optimizer that saved it, or start a "
        "new run from its weights (`zerofit export`)",
    )


def _kept_names(module: Any) -> set[str]:
    """Return the names of frozen parameters and buffers, which no optimizer holds."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return frozen | {name for name, _ in module.named_buffers()}


def _convert_together(folder: Path, tag: str, copy: Path, *, keeps: set[str]) -> None:
    """Convert on rank 0, while the others poll for a file, since a collective would time out."""
    done = copy / _DONE
    if rank_of_process() == 0:
        with contextlib.suppress(OSError):
            copy.mkdir()
    gather(None)
    if not all(gather(copy.is_dir())):
        found = f"{copy} can't be created, or is not visible on every node"
        raise _refused(folder, found, "all ranks read one converted copy, beside the checkpoint")
    problem = ""
    if rank_of_process() == 0:
        try:
            _convert(folder, tag, copy, keeps=keeps)
        except UserError as error:
            problem = f"{error.rule}: {error.found}"
        except Exception as error:  # the converter may raise anything
            problem = f"{type(error).__name__}: {error}"
        done.with_suffix(".partial").write_text(problem, encoding="utf-8")
        done.with_suffix(".partial").rename(done)
    while not done.exists():
        time.sleep(_POLL_S)
    problem = done.read_text(encoding="utf-8")
    if problem.startswith(f"{UNTRUSTED}: "):
        raise untrusted_checkpoint(problem.partition(": ")[2])
    if problem:
        raise _refused(folder, problem, "DeepSpeed's ds_to_universal failed")


def _convert(folder: Path, tag: str, copy: Path, *, keeps: set[str]) -> None:
    import torch
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    target = copy / tag
    options = Namespace(
        input_folder=str(folder / tag),
        output_folder=str(target),
        num_extract_workers=1,  # more would fork, which is unsafe with a GPU
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(options)
        rest = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag) if keeps else {}
    torch.save({name: value.clone() for name, value in rest.items() if name in keeps}, copy / _REST)
    _fill_in(target)


def _fill_in(target: Path) -> None:
    """Complete a universal checkpoint for loading at any ZeRO stage."""
    import torch

    place = target / "zero" / "optimizer_state.pt"
    saved = torch.load(place, map_location="cpu", weights_only=False)
    inner = saved.get("optimizer_state_dict")
    parameters = list((target / "zero").rglob("exp_avg.pt"))
    if inner is not None:  # ZeRO-3: bare tensors, and no steps
        step = inner["state"][0]["step"]
        for path in (target / "zero").rglob("*.pt"):
            value = torch.load(path, map_location="cpu", weights_only=False)
            if torch.is_tensor(value):
                torch.save({"param": value}, path)
        for path in parameters:
            torch.save(step, path.with_name("step.pt"))
    else:
        step = torch.load(parameters[0].with_name("step.pt"), weights_only=False)
    model = next(iter(sorted(target.glob("*model_states.pt"))))
    state = {key: saved[key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow") if key in saved}
    version = torch.load(model, map_location="cpu", weights_only=False, mmap=True)["ds_version"]
    groups = saved["param_groups"]
    state |= {"ds_version": version, "param_groups": groups}
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    torch.save(state, place)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if not (target / name).exists():
            shutil.copyfile(model, target / name)


def _load(engine: Any, copy: Path, tag: str, load: Any) -> Any:
    """Load a universal checkpoint, and keep this run's optimizer settings."""
    import torch

    optimizer = base_optimizer(engine)
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    found = load()
    saved = torch.load(copy / tag / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    if len(saved["param_groups"]) != len(groups):
        raise _refused(
            copy,
            f"{len(saved['param_groups'])} parameter groups, and the script creates {len(groups)}",
            "it is unknown which settings belong to which parameters",
        )
    for group, own, before in zip(optimizer.param_groups, groups, saved["param_groups"], strict=True):
        kept = {key: before[key] for key in _HYPERPARAMETERS if key in before}
        parameters = group["params"]
        group.clear()
        group.update({**own, **kept, "params": parameters})
    for state in optimizer.state.values():
        if "step" in state:
            step = float(state["step"])
            # torch's optimizers have a tensor for each parameter, DeepSpeed's a number.
            is_torch = type(optimizer).__module__.startswith("torch.")
            state["step"] = torch.tensor(step) if is_torch else int(step)
    _put_back(engine.module, torch.load(copy / _REST, map_location="cpu"))
    return found


def _put_back(module: Any, values: dict[str, Any]) -> None:
    """Load frozen parameters and buffers, which a universal checkpoint does not contain."""
    import deepspeed
    import torch

    places = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in values.items():
            place = places[name]
            if hasattr(place, "ds_id"):
                with deepspeed.zero.GatheredParameters([place], modifier_rank=0):
                    place.copy_(value)
            else:
                place.copy_(value)
