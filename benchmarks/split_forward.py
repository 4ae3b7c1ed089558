"""Measures the two ways to smaller micro-batches: a split forward pass, and a DataLoader of smaller batches.

The same small GPT-2 trains on the CPU on the same samples, whose labels differ in number. Each way takes the
optimizer steps of the script as it was written; by turns, because the speed of a machine drifts. Times are of
one thread's CPU, so that what else runs on the machine counts little.
"""

import argparse
import contextlib
import json
import platform
import statistics
import time
import weakref
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from zerofit.training.batch.micro_batches.hooks import replace_forward
from zerofit.training.batch.micro_batches.pending_backward import PendingBackward
from zerofit.training.batch.micro_batches.split_model import SplitModel
from zerofit.training.batch.micro_batches.splitter import Splitter
from zerofit.training.changes import Changes

WHOLE = "whole batches"
"""As the script was written: more memory than there is."""
AGAIN = "split, twice"
"""Each piece runs without and again with gradient."""
EARLY = "split, early"
"""All pieces but the last go backward in the forward pass, once the script's gradient can be guessed."""
LOADER = "small batches"
"""The DataLoader gives micro-batches, and the script's steps are accumulated."""
LOG_EVERY = 4
"""The script prints something whenever its step is a multiple of this."""
MIB = 2**20


class SavedTensors:
    """Counts the bytes that autograd holds for backward passes, parameters left out, and their peak."""

    def __init__(self, parameters: Any = ()) -> None:
        self.peak_bytes = 0
        self._bytes_now = 0
        self._num_holders: dict[int, int] = {}
        self._left_out = {one.untyped_storage().data_ptr() for one in parameters}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.tensor):
            yield

    def _pack(self, tensor: Any) -> Any:
        packed = _Packed(tensor)
        storage = tensor.untyped_storage()
        place, num_bytes = storage.data_ptr(), storage.nbytes()
        if place in self._left_out:
            return packed
        self._num_holders[place] = self._num_holders.get(place, 0) + 1
        if self._num_holders[place] == 1:
            self._bytes_now += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes_now)
        weakref.finalize(packed, self._free, place, num_bytes)
        return packed

    def _free(self, place: int, num_bytes: int) -> None:
        self._num_holders[place] -= 1
        if self._num_holders[place] == 0:
            self._bytes_now -= num_bytes


class _Packed:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def make_model(*, checkpoints: bool) -> Any:
    """Returns a GPT-2 of 4 layers without dropout."""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=2048,
            n_positions=128,
            n_embd=192,
            n_layer=4,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **dropout,
        )
    )
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def make_samples(*, number: int, num_tokens: int) -> list[dict[str, Any]]:
    """Returns samples with a quarter to all of their tokens as labels."""
    torch.manual_seed(1)
    samples = []
    for _ in range(number):
        words = torch.randint(0, 2048, (num_tokens,))
        labels = words.clone()
        labels[: int(torch.randint(0, 3 * num_tokens // 4, ()))] = -100
        samples.append({"input_ids": words, "labels": labels})
    return samples


def train(
    way: str, samples: list[dict[str, Any]], *, batch_size: int, micro_batch_size: int, checkpoints: bool
) -> dict[str, Any]:
    """Runs the script's loop in one way; returns what was measured and what the script saw."""
    model = make_model(checkpoints=checkpoints)
    pieces = batch_size // micro_batch_size if way == LOADER else 1
    loader = DataLoader(samples, batch_size=batch_size // pieces)
    num_forwards = 0
    own_forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return own_forward(*args, **kwargs)

    model.forward = counted
    backward = torch.Tensor.backward
    if way in (AGAIN, EARLY):
        pending = PendingBackward()
        splitter = Splitter(
            SplitModel(model, no_sync=contextlib.nullcontext, may_run_early=way == EARLY),
            micro_batch_size=micro_batch_size,
            changes=Changes(announce=False),
            pending=pending,
        )
        replace_forward(model, splitter)

        def backward(loss: Any) -> None:
            pending.backward(loss, run=lambda piece, _: piece.backward(), is_boundary=True)

    saved, times_s, num_logged, gradients = SavedTensors(model.parameters()), [], 0, []
    started = time.process_time()
    with saved.counted():
        for step, batch in enumerate(loader):
            backward(model(**batch).loss / pieces)
            num_logged += step % LOG_EVERY == 0
            if (step + 1) % pieces == 0:
                gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
                model.zero_grad()
                times_s.append(time.process_time() - started)
                started = time.process_time()
    return {
        "forward_passes": num_forwards,
        "step_cpu_time_s": statistics.median(times_s),
        "saved_mib": saved.peak_bytes / MIB,
        "len_dataloader": len(loader),
        "times_logged": num_logged,
        "gradients": gradients,
    }


def farthest(gradients: list[Any], expected: list[Any]) -> float:
    """Returns the largest relative distance of the gradients of any step."""
    pairs = zip(gradients, expected, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def measure(
    *, num_steps: int, batch_size: int, micro_batch_size: int, num_rounds: int, checkpoints: bool
) -> dict[str, dict[str, Any]]:
    """Returns the results of each way, its step time being the median over all rounds."""
    samples = make_samples(number=num_steps * batch_size, num_tokens=128)
    sizes: dict[str, Any] = {
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
        "checkpoints": checkpoints,
    }
    rounds = [
        {way: train(way, samples, **sizes) for way in (WHOLE, AGAIN, EARLY, LOADER)}
        for _ in range(num_rounds)
    ]
    expected = rounds[0][WHOLE]["gradients"]
    results = {}
    for way, last in rounds[-1].items():
        step_cpu_time_s = statistics.median(one[way]["step_cpu_time_s"] for one in rounds)
        off = farthest(last.pop("gradients"), expected)
        results[way] = {**last, "step_cpu_time_s": step_cpu_time_s, "gradients_off": off}
    return results


def show(results: dict[str, dict[str, Any]], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for name in (
        *("way", "forward passes", "CPU s/step", "saved MiB", "len(dataloader)"),
        *("times logged", "gradients off by"),
    ):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, one in results.items():
        table.add_row(
            *(way, str(one["forward_passes"]), f"{one['step_cpu_time_s']:.3f}", f"{one['saved_mib']:.1f}"),
            *(str(one["len_dataloader"]), str(one["times_logged"]), f"{one['gradients_off']:.0e}"),
        )
    Console(width=110).print(table)


def main() -> None:
    """Measures with and without activation checkpointing, and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    results = {
        name: measure(checkpoints=name == "checkpointed", **options) for name in ("plain", "checkpointed")
    }
    if arguments.json:
        packages = {name: version(name) for name in ("torch", "transformers")}
        print(
            json.dumps({"machine": platform.machine(), "versions": packages, **options, "results": results})
        )
        return
    batches = f"batches of {arguments.batch_size}, micro-batches of {arguments.micro_batch_size}"
    for name, one in results.items():
        show(one, f"{arguments.num_steps} optimizer steps, {batches}, activations {name}")


if __name__ == "__main__":
    main()
