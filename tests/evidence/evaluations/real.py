"""One real rank under torchrun: measures its cases, and rank 0 writes a line of JSON for each.

Usage: torchrun --nproc_per_node N real.py OUTPUT KEY... - with cases of one kind, FSDP2 or DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "evidence")]
from evaluations.cases import CASES, Case, deepspeed_config  # noqa: E402
from evaluations.trainers import make_model, make_trainer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IN_TRAINING, AFTER = "in training", "after training"


def measure(case: Case) -> dict[str, Any]:
    """Return the peaks of a case's evaluations on this rank, in bytes."""
    with tempfile.TemporaryDirectory() as folder, _gathering_as_nccl():
        if case.stage is None:
            return _measure_fsdp2(case, folder)
        return _measure_deepspeed(case, folder)


def _evaluating(phase: Callable[[str], None], *, device: torch.device | None = None) -> Any:
    """Return a Trainer that tells when it evaluates.

    Args:
        device: takes each loss, if not where it is: torch.tensor(), to which Trainer adds it, is on the host.
    """
    from transformers import Trainer

    class Evaluating(Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            phase(IN_TRAINING if self.is_in_train else AFTER)
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                phase("train")

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            return loss if device is None else loss.to(device)

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return Evaluating


def _measure_fsdp2(case: Case, folder: str) -> dict[str, Any]:
    from sharded.real import Tracker, watching_resizes

    from zerofit.core.upstream.fsdp2 import classes_to_wrap, offload_mode

    model = make_model(case)
    config = {
        "version": 2,
        "reshard_after_forward": case.reshard,
        "cpu_offload": case.offload,
        "transformer_layer_cls_to_wrap": classes_to_wrap(model),
    }
    tracker, host = Tracker(), list[Any]()
    copies = offload_mode(host, tracker.on_host) if case.offload else contextlib.nullcontext()
    with copies, watching_resizes(tracker), _moved_to_host():
        trainer = make_trainer(
            _evaluating(tracker.phase), case, model, folder,
            use_cpu=True, bf16=case.bf16, fsdp=True, fsdp_config=config,
        )  # fmt: skip
        trainer.accelerator.prepare = _tracked_prepare(case, trainer.accelerator.prepare, tracker)
        if case.offload:
            trainer.add_callback(_steps_on_host(tracker))
        with tracker:
            trainer.train()
            trainer.evaluate()
    return {"peaks": {name: tracker.peaks[name] for name in (IN_TRAINING, AFTER)}}


def _tracked_prepare(case: Case, prepare: Callable[..., Any], tracker: Any) -> Callable[..., Any]:
    """Return accelerator.prepare, which counts the shards and changes the model as `zerofit launch` does."""
    from torch.utils._python_dispatch import _disable_current_modes

    from zerofit.core.upstream.fsdp2 import keep_output_formats, reshard_after_evaluation

    @functools.wraps(prepare)
    def prepared(*objects: Any, **kwargs: Any) -> Any:
        if not any(isinstance(item, torch.nn.Module) for item in objects):
            return prepare(*objects, **kwargs)
        if case.is_launched:
            keep_output_formats(prepare.__self__.state.fsdp_plugin)
        with _disable_current_modes():
            made = prepare(*objects, **kwargs)
        (model,) = [item for item in made if isinstance(item, torch.nn.Module)]
        if case.is_launched:
            reshard_after_evaluation(model)
        with tracker.on_host() if case.offload else contextlib.nullcontext():
            for parameter in model.parameters():
                tracker.see(parameter)
        for buffer in model.buffers():
            tracker.see(buffer)
        return made

    return prepared


def _steps_on_host(tracker: Any) -> Any:
    """Return a callback that keeps an offloaded optimizer's tensors from being counted."""
    from transformers import TrainerCallback

    on_host = contextlib.ExitStack()

    class Steps(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            on_host.enter_context(tracker.on_host())

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            on_host.close()

    return Steps()


@contextlib.contextmanager
def _moved_to_host() -> Iterator[None]:
    """Make copies of the predictions that Trainer moves to the host, which on a CPU would be the same."""
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers import trainer_pt_utils

    original = trainer_pt_utils.nested_numpify

    def moved(tensors: Any) -> Any:
        with _disable_current_modes():
            copies = torch.utils._pytree.tree_map(lambda tensor: tensor.clone(), tensors)
            return original(copies)

    trainer_pt_utils.nested_numpify = moved
    try:
        yield
    finally:
        trainer_pt_utils.nested_numpify = original


def _measure_deepspeed(case: Case, folder: str) -> dict[str, Any]:
    from accelerate import PartialState
    from measuring_ranks import fresh_state
    from memory.devices import DEVICE, HOST, two_memories
    from memory.track import Tracker, summary
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda: True

    tracker = Tracker()
    with fresh_state(), two_memories(tracker), tracker:
        tracker.phase("load")
        trainer = make_trainer(
            _evaluating(tracker.phase, device=HOST), case, make_model(case), folder,
            deepspeed=deepspeed_config(case), bf16=case.bf16,
        )  # fmt: skip
        PartialState._shared_state["device"] = DEVICE
        trainer.accelerator.state.device = trainer.args.__dict__["_setup_devices"] = DEVICE
        trainer.train()
        trainer.evaluate()
        trainer.model_wrapped.destroy()
        del trainer
        tracker.phase("end")
    phases = [phase for phase in summary(tracker.phases) if phase["phase"] in (IN_TRAINING, AFTER)]
    return {
        "peaks": {phase["phase"]: phase["device"]["peak"] for phase in phases},
        "sites": {phase["phase"]: phase["device"]["sites_at_peak"] for phase in phases},
        "kinds": {phase["phase"]: phase["device"]["kinds_at_peak"] for phase in phases},
    }


@contextlib.contextmanager
def _gathering_as_nccl() -> Iterator[None]:
    """Let accelerate gather tensors as it does with NCCL, into one new tensor."""
    from accelerate import PartialState
    from accelerate.utils import operations

    original, into_tensor = operations._gpu_gather, torch.distributed.all_gather_into_tensor

    def flat(output: Any, tensor: Any) -> Any:  # gloo, unlike NCCL, compares shapes
        return into_tensor(output, tensor.view(-1))

    def gather(tensor: Any) -> Any:
        state = PartialState()
        before, state.backend = state.backend, "nccl"
        torch.distributed.all_gather_into_tensor = flat
        try:
            return original(tensor)
        finally:
            state.backend, torch.distributed.all_gather_into_tensor = before, into_tensor

    operations._gpu_gather = gather
    try:
        yield
    finally:
        operations._gpu_gather = original


def main() -> None:
    """Measure the cases that the command line names."""
    output, *keys = sys.argv[1:]
    wanted = {case.key: case for case in CASES}
    cases = [wanted[key] for key in keys]
    if cases[0].stage is None:
        from sharded.real import allow_on_cpu

        allow_on_cpu()
    else:
        import deepspeed
        import transformers  # noqa: F401 - before collectives are replaced
        from harness.rank import default_to_gloo

        deepspeed.logger.setLevel("ERROR")
        default_to_gloo()
    from memory.collectives import use_copies

    use_copies()
    torch.set_num_threads(1)
    for case in cases:
        found = measure(case)
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, found)
        if torch.distributed.get_rank() == 0:
            with Path(output).open("a", encoding="utf-8") as file:
                print(json.dumps([case.key, gathered]), file=file)
        gc.collect()
    torch.distributed.barrier()
    os._exit(0)  # the process group's threads may hang at exit


if __name__ == "__main__":
    main()
