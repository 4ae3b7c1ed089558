"""Logs of networks that fail: the cause names device and peer, and an abort is no crash of its own."""

from __future__ import annotations

import io

import pytest

from zerofit.launching.explain import explain_bytes

_NCCL = "gpu-7:4410:4803 [5] NCCL WARN "
_ABORTED = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "srun: error: gpu-7: task 1: Aborted (core dumped)\n"
    "slurmstepd: error: *** STEP 5512.0 ON gpu-a11 CANCELLED AT 2026-10-02T11:12:13 ***\n"
)
_REMOTE = (
    "[rank13]:[E1002 11:12:09.1 ProcessGroupNCCL.cpp:542] [Rank 13] Collective WorkNCCL(SeqNum=41) raised "
    "the following async exception: NCCL error: remote process exited or there was a network error\n"
    "ncclRemoteError: A call failed possibly due to a network error.\n"
)


def _explained(log: str) -> tuple[str, str, str, str]:
    cause = explain_bytes(io.BytesIO(log.encode()), "log").cause
    assert cause is not None
    return cause.failure.id, cause.failure.cause.partition(": ")[2], cause.failure.fix, str(cause.confidence)


@pytest.mark.parametrize(
    ("line", "said", "looks"),
    [
        (
            f"{_NCCL}NET/IB : Got completion from peer 10.9.1.4<5> with status=12 opcode=0 len=0 vendor err "
            "129 (Recv) localGid fe80::1 remoteGidsfe80::2 hca mlx5_7",
            "retries exceeded, gpu-7 mlx5_7 -> 10.9.1.4",
            "ibstat mlx5_7 on gpu-7, ibstat on 10.9.1.4",
        ),
        (  # since NCCL 2.28
            f"{_NCCL}NET/IB: Got completion from peer 10.9.1.4<5> with status=IBV_WC_RETRY_EXC_ERR(12) "
            "opcode=IBV_WC_RECV(128) reqSize=0 vendor_err=129 hca mlx5_bond_0",
            "retries exceeded, gpu-7 mlx5_bond_0 -> 10.9.1.4",
            "ibstat mlx5_bond_0 on gpu-7, ibstat on 10.9.1.4",
        ),
        (  # before 2.19, over IPv6
            f"{_NCCL}NET/IB : Got completion from peer fe80::9a:3%ib0<33397> with error 4, opcode 32611, "
            "len 9, vendor err 81 (Send)",
            "local protection error, gpu-7 -> fe80::9a:3%ib0",
            "NCCL_NET_GDR_LEVEL=LOC in front of the command",
        ),
        (
            f"{_NCCL}NET/IBP : Got completion from peer 10.9.1.4<5> with status=13 opcode=1 len=4 vendor err "
            "135 (Send)",
            "receiver not ready, gpu-7 -> 10.9.1.4",
            "ibstat on gpu-7, ibstat on 10.9.1.4",
        ),
        (
            f"{_NCCL}NET/IB : mlx5_2:1 Got async event : port error",
            "gpu-7 mlx5_2",
            "ibstat mlx5_2 on gpu-7",
        ),
        (
            "gpu-7:4410:0:4410] ud_ep.c:278 Fatal: Transport retry count exceeded on mlx5_1:1/IB",
            "mlx5_1",
            "ibstat mlx5_1 on this node",
        ),
        (
            f"{_NCCL}Call to recv from 10.9.1.4<41267> failed : Connection timed out",
            "gpu-7 -> 10.9.1.4",
            "ibstat on gpu-7, ibstat on 10.9.1.4",
        ),
    ],
)
def test_a_failed_network_is_named_with_device_and_peer(line: str, said: str, looks: str) -> None:
    for log in (f"{line}\n", f"step 3\n{line}\n{_REMOTE}{_ABORTED}"):
        failure, cause, fix, confidence = _explained(log)
        assert (failure, cause, confidence) == ("network-failed", said, "medium")
        assert looks in fix


def test_a_time_out_half_an_hour_later_is_a_consequence() -> None:
    line = f"{_NCCL}NET/IB : Got completion from peer 10.9.1.4<5> with status=12 opcode=0 vendor err 129\n"
    timeout = (
        "[rank2]:[E1002 11:42:09.1 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800061 "
        "milliseconds before timing out.\n"
    )
    assert _explained(f"{line}{_REMOTE}{timeout}{_ABORTED}")[0] == "network-failed"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        # The peer ran out of memory, which the adapter of the other node sees as an unanswered message.
        (
            "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            f"{_NCCL}NET/IB : Got completion from peer 10.9.1.4<5> with status=12 opcode=0 vendor err 129\n",
            "gpu-out-of-memory",
        ),
        # Flushed messages say that the connection is being taken down.
        (
            f"{_NCCL}NET/IB : Got completion from peer 10.9.1.4<5> with status=5 opcode=0 vendor err 249\n",
            "peer-lost",
        ),
        (
            f"{_NCCL}NET/IB : Got completion from peer 10.9.1.4<5> with error 5, opcode 0, vendor err 249\n",
            "peer-lost",
        ),
        (f"{_REMOTE}{_ABORTED}", "remote-error"),
        (_REMOTE, "remote-error"),
        (
            "what():  CUDA error: an illegal memory access was encountered\nAborted (core dumped)\n",
            "illegal-memory-access",
        ),
        ("run.sh: line 3: 88 Aborted                 (core dumped) python train.py\n", None),
        ("python: double free or corruption (out)\nAborted (core dumped)\n", "segmentation-fault"),
        (
            "train.sh: line 7: 912 Segmentation fault      (core dumped) python train.py\n",
            "segmentation-fault",
        ),
    ],
)
def test_an_abort_is_the_end_of_what_the_log_says_before(log: str, cause: str | None) -> None:
    found = explain_bytes(io.BytesIO(log.encode()), "log").cause
    assert (found and found.failure.id) == cause
