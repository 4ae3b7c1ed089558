"""zerofit explain's engine: each failure by its log, order of ranks, tracebacks, encodings, size."""

from __future__ import annotations

import io
import time
import tomllib
import tracemalloc
from pathlib import Path

import pytest

from zerofit.core.secrets import masked_text
from zerofit.launching.explain import CauseConfidence, Explanation, explain_bytes, explain_logs
from zerofit.launching.failures import failures
from zerofit.launching.log_lines import LogLine, moment_of

_LOGS = tomllib.loads(Path(__file__).with_name("failure_logs.toml").read_text(encoding="utf-8"))


def _explained(text: str | bytes) -> Explanation:
    return explain_bytes(io.BytesIO(text.encode() if isinstance(text, str) else text), "log")


def _cause(text: str | bytes) -> str | None:
    cause = _explained(text).cause
    return None if cause is None else cause.failure.id


def test_each_failure_has_a_log() -> None:
    assert set(failures()) == set(_LOGS)
    assert len(failures()) >= 60


@pytest.mark.parametrize(("name", "log"), _LOGS.items(), ids=list(_LOGS))
def test_failure_is_known_by_its_log(name: str, log: str) -> None:
    assert _cause(f"step 1\n{log}\nbye\n") == name


TRACEBACK = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 12, in <module>
[rank1]:     main()
[rank1]:   File "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
[rank1]:     return F.linear(input)
[rank1]: torch.OutOfMemoryError: CUDA out of memory.
"""
LOST = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.1]:29500\n"


@pytest.mark.parametrize("log", [LOST + TRACEBACK, TRACEBACK + LOST], ids=["victim first", "cause first"])
def test_a_root_cause_precedes_its_consequences(log: str) -> None:
    found = _explained(log)
    assert found.cause is not None
    assert found.cause.failure.id == "gpu-out-of-memory"
    assert found.cause.at.rank == 1
    assert found.cause.frame == "train.py:12"
    assert [one.failure.id for one in found.others] == ["peer-lost"]


def test_earliest_root_of_a_log_wins() -> None:
    full = "OSError: [Errno 28] No space left on device\n"
    assert _cause(full + TRACEBACK) == "disk-full"
    assert _cause(TRACEBACK + full) == "gpu-out-of-memory"


@pytest.mark.parametrize(
    ("vague", "specific", "cause"),
    [
        ("ncclInvalidUsage: x", "Duplicate GPU detected : rank 1 and rank 0", "invalid-device-ordinal"),
        ("ncclUnhandledCudaError: x", "Cuda failure 2 'out of memory'", "gpu-out-of-memory"),
        (
            "ncclSystemError: x",
            "Error while creating shared memory segment /dev/shm/a",
            "shared-memory-full",
        ),
        (
            "RuntimeError: Error(s) in loading state_dict for Net:",
            "size mismatch for a: copying a param with shape torch.Size([8]), here torch.Size([0])",
            "zero3-empty-weight",
        ),
    ],
)
def test_a_vague_root_cause_comes_after_any_other(vague: str, specific: str, cause: str) -> None:
    assert _cause(f"{vague}\nLast error:\n{specific}\n") == cause
    alone = _explained(vague).cause
    assert alone is not None
    assert alone.confidence is CauseConfidence.MEDIUM


WORKER = """\
Traceback (most recent call last):
ConnectionRefusedError: [Errno 111] Connection refused

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly
"""
OTHER_RANK = (
    "torch.OutOfMemoryError: CUDA out of memory. Process 8 has 474.00 MiB memory in use. Including non-"
    "PyTorch memory, this process has 60.30 GiB memory in use. Process 9 has 474.00 MiB memory in use.\n"
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (WORKER, "killed"),
        (WORKER.replace("unexpectedly", "unexpectedly with exit code 1. Details"), "unknown-exception"),
        (OTHER_RANK, "gpu-out-of-memory"),
        ("n:1:1 [0] NCCL INFO libnccl-net.so: cannot open shared object file\n" + LOST, "peer-lost"),
        ("n:1:1 [0] NCCL INFO connect returned No route to host, retrying\n", "nccl-system-error"),
        ("[W socket.cpp:6] The client socket has failed to connect to [::]:1\n" + LOST, "peer-lost"),
        (
            "[2025-02-20 20:27:14,902] [INFO] [launch.py:328] Main process received SIGINT, exiting\n",
            "cancelled",
        ),
        (
            "RuntimeError: Input type (CUDAHalfType) and weight type (torch.FloatTensor) x\n",
            "different-devices",
        ),
        (
            "RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.HalfTensor) x\n",
            "different-devices",
        ),
        (
            "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.HalfTensor) x\n",
            "different-devices",
        ),
        (
            "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.BFloat16Tensor) x\n",
            "different-dtypes",
        ),
        (
            "RuntimeError: Input type (torch.BFloat16Tensor) and weight type (torch.FloatTensor) x\n",
            "different-dtypes",
        ),
        ("srun: fatal: --mem and --mem-per-cpu are mutually exclusive\n", "scheduler-refused"),
        (
            '{"message":"RuntimeError: CUDA error: out of memory","level":"error","log":{"level":"info"}}\n',
            "gpu-out-of-memory",
        ),
        ("RuntimeError: Input type (CUDAHalfType) and weight type (CUDAFloatType) x\n", "different-dtypes"),
        ("terminate called after\nWatchdog caught collective operation timeout: x\n", "nccl-timeout"),
        ("RendezvousClosedError\nReceived 15 death signal, shutting down workers\n", "cancelled"),
        ("n2: bash: line 1: /v/bin/python: No such file or directory\n", "file-missing"),
        ("pdsh@n1: n2: ssh exited with exit code 1\n", "rank-failed"),
        ("      Reason:       Error\n      Exit Code:    137\n", "killed"),
        ("srun: error: n1: task 3: Out Of Memory\n", "killed-for-memory"),
        ("ProcessExitedException: process 0 terminated with signal SIGKILL\n", "killed"),
    ],
)
def test_what_says_more_is_the_cause(log: str, cause: str) -> None:
    assert _cause(log) == cause


IGNORED = "Exception ignored in: <f>\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
FULL = (
    "Traceback (most recent call last):\n  File 'a.py', line 1\ntorch.OutOfMemoryError: CUDA out of memory\n"
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (IGNORED + "Traceback (most recent call last):\nKeyError: 'x'\n" + DURING + FULL, None),
        (IGNORED + "Traceback (most recent call last):\nKeyError: 'x'\n" + DIRECT + FULL, None),
        (IGNORED + "KeyError: 'x'\n" + DURING + FULL + DIRECT + FULL, None),
        (IGNORED + "KeyError: 'x'\n" + DURING + FULL + FULL, "gpu-out-of-memory"),
        (IGNORED + "StopIteration\nepoch 1\n" + FULL, "gpu-out-of-memory"),
        (IGNORED + "epoch 1\n" + FULL, "gpu-out-of-memory"),
        (IGNORED + "Traceback (most recent call last):\n  File 'b.py', line 1\n" + FULL, "gpu-out-of-memory"),
        ("Task exception was never retrieved\n" + FULL, "gpu-out-of-memory"),
        ("Future exception was never retrieved\n" + FULL, "gpu-out-of-memory"),
    ],
)
def test_an_ignored_exception_ends_where_another_begins(log: str, cause: str | None) -> None:
    assert _cause(log) == cause


def test_logs_of_ranks_are_ordered_by_their_times(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(
        "[2024-05-01 12:00:09,100] [INFO] x\nRuntimeError: No CUDA GPUs are available\n"
    )
    (tmp_path / "rank1.log").write_text(
        "I0501 12:00:08.000000 7 a.py:1] x\nOSError: [Errno 28] No space left on device\n"
    )
    found = explain_logs(sorted(tmp_path.iterdir()), root=tmp_path)
    assert found.cause is not None
    assert (found.cause.failure.id, found.cause.at.rank) == ("disk-full", 1)


def test_the_exception_that_propagated_is_the_cause_of_a_chain() -> None:
    handled = "Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 'cache'\n\n"
    during = "During handling of the above exception, another exception occurred:\n\n"
    direct = "The above exception was the direct cause of the following exception:\n\n"
    last = "Traceback (most recent call last):\n  File 'a.py', line 2\nAttributeError: 'x' has no y\n"
    assert _cause(handled + during + last) == "attribute-missing"
    assert _cause(handled + direct + last) == "column-missing"


def test_handled_exception_in_a_message_is_no_cause() -> None:
    assert _cause("triton is not there: No module named 'triton'\nstep 1\n") is None


def test_unknown_exception_is_the_scripts() -> None:
    found = _explained(
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nmy.Odd: no\n'
    ).cause
    assert found is not None
    assert (found.failure.cause, found.confidence) == ("the script raised Odd", CauseConfidence.MEDIUM)


@pytest.mark.parametrize(
    ("log", "frame"),
    [
        ('  File "a.py", line 63\n    def f(:\n          ^\nSyntaxError: invalid syntax\n', "a.py:63"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 3, in f\n'
            '  File "/usr/lib/python3.10/asyncio/tasks.py", line 650, in g\nmy.Odd: no\n',
            "a.py:3",
        ),
        (
            'Traceback (most recent call last):\n  File "/v/site-packages/x.py", line 5, in g\nmy.Odd: no\n',
            "/v/site-packages/x.py:5",
        ),
        ('[rank0]:   File "a.py", line 1, in f\n[rank1]: MyError: no\n', None),
        ('[rank1]:   File "a.py", line 1, in f\n[rank0]: x\n[rank1]: MyError: no\n', "a.py:1"),
    ],
)
def test_frame_is_the_scripts_or_else_the_librarys(log: str, frame: str | None) -> None:
    found = _explained(log).cause
    assert found is not None
    assert found.frame == frame


@pytest.mark.parametrize(
    "log",
    [
        "",
        "epoch 1: loss 2.3\nepoch 2: loss 2.1\ntraining is done\n",
        "[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.\n",
        "[2024-05-01 12:00:00,000] [WARNING] [engine.py:1] You are using ZeRO with an untested optimizer\n",
        "UserWarning: this will be an error in future\n",
        "[rank1]:[W326 00:35:03.83 TCPStore.cpp:125] [c10d] recvValue failed: Connection reset by peer\n",
        "W0428 15:12:20.075000 7 site-packages/a.py:1282] RendezvousConnectionError\n",
        "2023-05-01 10:00:00.1: W tensorflow/a.cc:64] Error: libx.so: cannot open shared object file\n",
        '{"time":"2025-12-02T03:36:54+08:00","level":"INFO","msg":"retrying","error":"502 Server Error"}\n',
        "/v/torchvision/io/image.py:13: UserWarning: Failed to load image extension: undefined symbol: _Z\n",
        "/opt/rocm/lib/libamd_smi.so: cannot open shared object file: No such file or directory\n",
        "Sliding Window Attention is enabled but not implemented for `sdpa`; unexpected results\n",
        "'(MaxRetryError(\"Max retries exceeded with url\"))' thrown while requesting HEAD https://x\n",
        "--- Logging error ---\nTraceback (most recent call last):\nTypeError: not all arguments converted\n",
        "Exception ignored in: <f>\nTraceback (most recent call last):\nFileNotFoundError: x\n",
        "bash: warning: setlocale: LC_ALL: cannot change locale (C.UTF-8): No such file or directory\n",
        "[2024-05-01 12:00:00,000] [INFO] [engine.py:1] saving zero_pp_rank_0_mp_rank_00_optim_states.pt\n",
        "[2024-05-01 12:00:00,000] [INFO] nvme_path=None stage3_gather_16bit_weights_on_model_save\n",
        "[2024-05-01 12:00:00,000] [INFO] [launch.py:1] Process 7 exits successfully.\n",
        "Exit Code: 0   Duration: 137 s\n",
        "srun: fatal: Can't find plugin for switch/hpe_slingshot\n",
        bytes(range(256)) * 64,
    ],
)
def test_log_without_a_failure_has_no_cause(log: str | bytes) -> None:
    assert _explained(log).cause is None


@pytest.mark.parametrize(
    "log",
    [
        TRACEBACK.encode("utf-16"),
        TRACEBACK.encode("utf-16-le"),
        b"\xff\xfe\x00\x01garbage\x00\n".replace(b"\xff\xfe", b"\x80\x81") + TRACEBACK.encode(),
        "caf\xe9\n".encode("latin-1") + TRACEBACK.encode(),
        TRACEBACK.replace("torch.Out", "\x1b[31mtorch.\x1b[0mOut").encode(),
        b"10%|#  |\r20%|## |\r30%|###|\r" + TRACEBACK.encode(),
        TRACEBACK.replace("\n", "\r\n").encode(),
    ],
    ids=["utf-16", "utf-16 without mark", "garbage", "latin-1", "colours", "progress bar", "windows"],
)
def test_encodings_colours_and_progress_bars(log: bytes) -> None:
    found = _explained(log).cause
    assert found is not None
    assert (found.failure.id, found.at.rank) == ("gpu-out-of-memory", 1)


def test_line_numbers_count_what_an_editor_counts() -> None:
    found = _explained(b"1\r2\r3\nOSError: [Errno 28] No space left on device\n").cause
    assert found is not None
    assert found.at.line == 2


@pytest.mark.parametrize(
    ("line", "rank", "said"),
    [
        ("[rank3]: x", 3, "x"),
        ("[default3]:[rank3]: x", 3, "x"),
        ("3: x", 3, "x"),
        ("[1,3]<stderr>:x", 3, "x"),
        ("rank3: x", 3, "x"),
        ("node7: x", None, "x"),
        ("192.168.205.202: [rank3]: x", 3, "x"),
        ("0: [rank3]: x", 3, "x"),
        ("[rank3]: 404: not found", 3, "404: not found"),
        ('[rank0]:       7: "x",', 0, '      7: "x",'),
        ("node7: 3: 404: x", 3, "404: x"),
        ("2025-10-31 03:11:02,478 - SimpleTuner - INFO - [rank3]: x", 3, "x"),
        ("704.7s\t1439\t[rank3]: x", 3, "x"),
        ("worker-0 [stderr] [rank3]:x", 3, "x"),
        ('"see [rank3]: x"', None, '"see [rank3]: x"'),
        ("E   KeyError: 'step'", None, "KeyError: 'step'"),
        ("stderr: [rank3]: x", 3, "x"),
        ("stdout: step 3", None, "step 3"),
        ("[2024-09-15 20:18:04] [INFO] [rank3]: x", 3, "x"),
        ("> > [rank3]: x", 3, "x"),
        ("(Actor pid=7, ip=10.0.0.2) x", None, "x"),
        ("ValueError: x", None, "ValueError: x"),
        ("2024-05-01T12:00:00.5Z stderr F x", None, "x"),
    ],
)
def test_prefixes(line: str, rank: int | None, said: str) -> None:
    assert (LogLine(number=1, text=line).rank, LogLine(number=1, text=line).said) == (rank, said)


@pytest.mark.parametrize(
    "text",
    [
        "2024-05-01 12:00:03,250 x",
        "[2024-05-01T12:00:03.25] x",
        "05/01/2024 12:00:03.25 - INFO",
        "[E501 12:00:03.250000000 a.cpp:1]",
        "I0501 12:00:03.250 x",
        "May  1 12:00:03.25 host kernel: x",
    ],
)
def test_times(text: str) -> None:
    assert moment_of(text) == (5, 1, 12, 0, 3, 250000)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("login hf_abcdefghijklmnopqrstuv", "login ***"),
        ("WANDB_API_KEY=0123456789abcdef01", "WANDB_API_KEY=***"),
        ("--hub_token abcdef0123456789", "--hub_token ***"),
        ("num_tokens: 4096000000000", "num_tokens: 4096000000000"),
        ("eos_token = </s>", "eos_token = </s>"),
    ],
)
def test_secrets_are_masked(text: str, masked: str) -> None:
    assert masked_text(text) == masked


class _Repeated(io.RawIOBase):
    """A log of many mebibytes that no memory holds."""

    def __init__(self, mebibytes: int) -> None:
        line = "{'loss': 1.%d, 'learning_rate': 2e-05}\n"
        self._block = "".join(line % number for number in range(26_000)).encode()[: 1 << 20]
        self._left = mebibytes

    def read(self, size: int = -1) -> bytes:
        self._left -= 1
        return self._block if self._left >= 0 else b""


def test_memory_does_not_grow_with_the_log() -> None:
    _explained("warm up\n")
    tracemalloc.start()
    explain_bytes(_Repeated(8), "log")  # type: ignore[arg-type]  # read() is all that is used
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_one_endless_line_is_read_too() -> None:
    begun = time.monotonic()
    assert _cause(b"x" * (8 << 20)) is None
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("line", ["Error " + "a1" * 30_000, "a1" * 30_000 + " Error", "Error" + "." * 60_000])
def test_a_long_line_is_read_fast(line: str) -> None:
    begun = time.monotonic()
    _explained(line)
    assert time.monotonic() - begun < 2
