"""Measures the rates of this machine in a process of its own: this module run as a program.

Its one argument is JSON: num_gpus, has_fast_links, has_cpu_adam, nvme_path, short. It prints one line of
JSON per rate, {"measured": {name, value, unit, how}}, or {"left_out": TEXT}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.core.module_path import OWN_PROGRAM
from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit
from zerofit.machine.port import free_port
from zerofit.machine.programs import output_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerofit.core.facts import Machine

PROGRAM = (*OWN_PROGRAM, "zerofit.machine.calibration")
_SECONDS = 0.5
"""Duration of each measurement: a GPU's clocks settle in it, and all rates together take half a minute."""
_ADDS_OF_AN_OPERATOR = 3.6
"""What an operator of a model takes, in in-place adds without autograd: on the machine of
benchmarks/measured/nvidia-h200.json an add took 6.9 us, and its steps fit 25 us an operator."""
_TIMEOUT_S = 120
"""ASSUMPTION: twice the expected time; what was measured until then is kept."""


def calibrate(
    machine: Machine,
    *,
    has_cpu_adam: bool,
    nvme_path: str | None = None,
    short: bool = False,
    environ: Mapping[str, str] = os.environ,
    program: tuple[str, ...] = PROGRAM,
    timeout_s: float = _TIMEOUT_S,
) -> Calibration:
    """Measure the achieved rates of this machine's GPUs, links, host memory, CPU Adam, collectives and disk.

    Runs in processes of its own, since CUDA can't be shut down once started; takes less than a minute.

    Args:
        machine: this machine, with the GPUs to measure.
        has_cpu_adam: whether DeepSpeed's op is built; otherwise torch's fused AdamW is timed for information
            only, and gives no rate.
        nvme_path: a folder on the disk for NVMe offload; None measures no disk.
        short: measure small sizes only, for a test of the program.
        environ: the program's environment.
        program: the program that measures.
        timeout_s: when to end it.
    """
    orders = {
        "num_gpus": len(machine.gpus),
        "has_fast_links": bool(machine.gpus) and all(gpu.has_fast_links for gpu in machine.gpus),
        "has_cpu_adam": has_cpu_adam,
        "nvme_path": nvme_path,
        "short": short,
    }
    output, why = output_of(
        (*program, json.dumps(orders)),
        limit_s=timeout_s,
        environ={**environ, "DS_ACCELERATOR": "cuda" if machine.gpus else "cpu"},
    )
    lines = [json.loads(line) for line in output.splitlines()]
    return Calibration(
        rates=tuple(_rate(line["measured"]) for line in lines if "measured" in line),
        left_out=(
            *(line["left_out"] for line in lines if "left_out" in line),
            *((f"the rest: {why}",) if why else ()),
        ),
    )


def _rate(plain: dict[str, Any]) -> Rate:
    return Rate(
        name=RateName(plain["name"]),
        value=plain["value"],
        unit=Unit(plain["unit"]),
        basis=Basis.MEASURED,
        source=plain["how"],
    )


class _Report:
    """Prints each result as soon as it is known, since the next measurement may hang."""

    def __init__(self, report_to: int, *, short: bool) -> None:
        self.short = short
        self._report_to = report_to

    def note(self, name: str, value: float, unit: str, how: str) -> None:
        self._say({"measured": {"name": name, "value": value, "unit": unit, "how": how}})

    def leave_out(self, what: str) -> None:
        self._say({"left_out": what})

    def _say(self, line: dict[str, Any]) -> None:
        os.write(self._report_to, (json.dumps(line) + "\n").encode())

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """Run one measurement; if it fails, report the exception as the reason."""
        try:
            measure()
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            self.leave_out(f"{what}: {type(error).__name__}: {first_line}")

    def repeat(self, work: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
        """Return the median time of one call in seconds, after one warm-up call."""
        work()
        wait()
        times: list[float] = []
        end = time.perf_counter() + (_SECONDS / 5 if self.short else _SECONDS)
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]


def main() -> None:
    """Measure, and print the report on stdout; output of torch and DeepSpeed goes to stderr."""
    report_to = os.dup(1)
    os.dup2(2, 1)
    orders = json.loads(sys.argv[1])
    report = _Report(report_to, short=orders["short"])
    if orders["num_gpus"]:
        report.attempt("GPU", lambda: _gpu(report))
        report.attempt("copies between GPU and host", lambda: _copies(report))
    else:
        report.leave_out("GPU, and copies between GPU and host: there is none")
    report.attempt("host memory", lambda: _host_memory(report))
    report.attempt("CPU Adam", lambda: _cpu_adam(report, orders["has_cpu_adam"]))
    report.attempt("all-reduce", lambda: _all_reduce(report, orders["num_gpus"], orders["has_fast_links"]))
    if orders["nvme_path"]:
        report.attempt("disk", lambda: _disk(report, orders["nvme_path"]))
    else:
        report.leave_out("disk: no --nvme-path")


def _gpu(report: _Report) -> None:
    import torch

    wait = torch.cuda.synchronize
    size = 1024 if report.short else 8192
    names = {
        torch.float32: "matrix products in fp32",
        torch.bfloat16: "matrix products in 16 bit",
    }
    if torch.cuda.get_device_capability() < (8, 0):
        names = {torch.float32: names[torch.float32], torch.float16: names[torch.bfloat16]}
    for dtype, name in names.items():
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        seconds = report.repeat(partial(torch.mm, a, b), wait)
        report.note(name, 2 * size**3 / seconds, "flops/s", f"{size} x {size}, {dtype}")
    source = torch.empty(2**28 if report.short else 2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = report.repeat(lambda: target.copy_(source), wait)
    report.note("device memory", 2 * len(source) / seconds, "bytes/s", "copy on the GPU, read and written")
    small, count = torch.zeros(16, device="cuda"), 500
    seconds = report.repeat(lambda: [small.add_(1) for _ in range(count)], wait)
    report.note(
        "dispatch of an operator",
        _ADDS_OF_AN_OPERATOR * seconds / count,
        "s",
        f"{_ADDS_OF_AN_OPERATOR:g} times an in-place add, for Python and autograd",
    )


def _copies(report: _Report) -> None:
    import torch

    num_bytes = 2**26 if report.short else 2**29
    here = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    for name, pins in (
        ("copy from and to pinned memory", True),
        ("copy from and to pageable memory", False),
    ):
        there = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pins)
        down = report.repeat(partial(there.copy_, here), torch.cuda.synchronize)
        up = report.repeat(partial(here.copy_, there), torch.cuda.synchronize)
        how = f"the slower of {num_bytes / up / 1e9:.1f} GB/s up and {num_bytes / down / 1e9:.1f} GB/s down"
        report.note(name, num_bytes / max(up, down), "bytes/s", how)


def _host_memory(report: _Report) -> None:
    import torch

    source = torch.ones(2**25 if report.short else 2**28, dtype=torch.float32)
    target = torch.empty_like(source)
    seconds = report.repeat(lambda: target.copy_(source))
    report.note(
        "host memory", 2 * 4 * len(source) / seconds, "bytes/s", f"copy, {torch.get_num_threads()} threads"
    )


def _cpu_adam(report: _Report, has_cpu_adam: bool) -> None:
    import torch

    elements = 2**22 if report.short else 2**26
    weight = torch.nn.Parameter(torch.zeros(elements))
    weight.grad = torch.ones(elements)
    threads = f"{torch.get_num_threads()} threads"
    if has_cpu_adam:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        seconds = report.repeat(DeepSpeedCPUAdam([weight]).step)
        report.note("CPU Adam", elements / seconds, "elements/s", f"DeepSpeedCPUAdam, {threads}")
        return
    # A build takes a minute or more, and leaves a lock behind if interrupted.
    seconds = report.repeat(torch.optim.AdamW([weight], fused=True).step)
    report.leave_out(
        f"CPU Adam: DeepSpeedCPUAdam is not built; torch's fused AdamW, another program, stepped "
        f"{elements / seconds / 1e9:.3g} billion parameters/s with {threads}"
    )


def _all_reduce(report: _Report, num_gpus: int, has_fast_links: bool) -> None:
    import torch

    if num_gpus == 1:
        report.leave_out("all-reduce: there is one GPU")
        return
    num_ranks = num_gpus or 2
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    arguments = (num_ranks, free_port(0), bool(num_gpus), report.short, answers)
    torch.multiprocessing.spawn(_all_reduce_rank, args=arguments, nprocs=num_ranks)
    large, small, num_bytes = answers.get()
    if not num_gpus:
        # Over loopback, between processes that share the cores: useless for estimates of GPUs.
        report.leave_out(
            f"all-reduce between GPUs: there is none; gloo over {num_ranks} processes gave "
            f"{num_bytes * 2 * (num_ranks - 1) / num_ranks / large / 1e9:.2f} GB/s of bus bandwidth"
        )
        return
    bus = num_bytes * 2 * (num_ranks - 1) / num_ranks / large
    how = f"NCCL, {num_ranks} ranks, {num_bytes} bytes"
    name = "all-reduce over NVLink" if has_fast_links else "all-reduce over PCIe"
    report.note(name, bus, "bytes/s", how)
    report.note("message", small, "s", f"NCCL, {num_ranks} ranks, 4 bytes")


def _all_reduce_rank(rank: int, num_ranks: int, port: int, has_gpus: bool, short: bool, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    device = f"cuda:{rank}" if has_gpus else "cpu"
    if has_gpus:
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "nccl" if has_gpus else "gloo", init_method=address, rank=rank, world_size=num_ranks
    )
    wait = torch.cuda.synchronize if has_gpus else (lambda: None)

    def seconds(num_bytes: int) -> float:
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        times = []
        # A fixed number of rounds, which must be equal on all ranks.
        for _ in range(6):
            dist.barrier()
            wait()
            start = time.perf_counter()
            dist.all_reduce(data)
            wait()
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[2]

    num_bytes = 2**28 if has_gpus and not short else 2**22 if short else 2**26
    large, small = seconds(num_bytes), seconds(4)
    if rank == 0:
        answers.put((large, small, num_bytes))
    dist.destroy_process_group()


def _disk(report: _Report, folder: str) -> None:
    num_bytes, block = (2**26, 2**22) if report.short else (2**30, 2**24)
    data = os.urandom(block)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".zerofit-") as file:
        start = time.perf_counter()
        for _ in range(num_bytes // block):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        # Without this the read would come from the page cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with open(file.name, "rb", buffering=0) as reader:
            while reader.read(block):
                pass
        read = time.perf_counter() - start
    how = f"{num_bytes} bytes in {folder}, one stream, page cache dropped"
    report.note("NVMe write", num_bytes / written, "bytes/s", how)
    report.note("NVMe read", num_bytes / read, "bytes/s", how)


if __name__ == "__main__":
    main()
