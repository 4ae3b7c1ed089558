"""Messages that name a failure, each in several forms, and messages like them that do not."""

from __future__ import annotations

import io

import pytest

from zerofit.launching.explain import explain_bytes

_LIBRARIES = "/opt/env/lib/python3.12/site-packages"


def _cause(log: str) -> str | None:
    cause = explain_bytes(io.BytesIO(log.encode()), "log").cause
    return None if cause is None else cause.failure.id


def _raised(exception: str, frame: str) -> str:
    return f'Traceback (most recent call last):\n  File "{_LIBRARIES}/{frame}\n    x()\n{exception}\n'


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (
            "ranks-disagree",
            "[rank3]: RuntimeError: Detected a disagreement on list length between rank0 and rank3:",
        ),
        (
            "ranks-disagree",
            "RuntimeError: disagreement between rank0 and rank1: rank0: [11, 12], rank1: [11]",
        ),
        ("ranks-disagree", "RuntimeError: disagreement between rank0 and rank5: rank0: [], rank5: [7]"),
        (
            "models-differ",
            "RuntimeError: DDP expects same model across all ranks, but Rank 3 has 290 params, while rank 0 "
            "has inconsistent 291 params.",
        ),
        (
            "models-differ",
            "RuntimeError: [5]: params[0] in this process with sizes [32001, 64] appears not to match sizes "
            "of the same param in process 0.",
        ),
        (
            "models-differ",
            "RuntimeError: [1]: params[7] in this process with strides [1, 8] appears not to match strides "
            "of the same param in process 0.",
        ),
        (
            "models-differ",
            "[rank2]: RuntimeError: DDP expects same model across all ranks, but Rank 2 has 8 params, while "
            "rank 0 has inconsistent 0 params.",
        ),
        (
            "models-differ",
            "[1]: params[1] in this process with sizes [9] appears not to match sizes of the same param in "
            "process 0",
        ),
        (
            "aborted",
            "prterun noticed that process rank 7 with PID 0 on node n exited on\nsignal 6 (Aborted).",
        ),
        ("killed", "mpirun noticed that process rank 1 with PID 4 on node n1 exited on signal 9 (Killed)."),
        (
            "segmentation-fault",
            "prterun noticed that process rank 1 with PID 4 on node n exited on\n"
            "signal 11 (Segmentation fault).",
        ),
        (
            "peer-lost",
            "WARNING:torch.distributed.elastic.rendezvous.dynamic_rendezvous:The node 'n_34_0' has failed to "
            "send a keep-alive heartbeat to the rendezvous 'a' due to an error of type "
            "RendezvousConnectionError.",
        ),
        ("strategy-mismatch", "ValueError: At most one of fp16 and bf16 can be True, but not both"),
        (
            "strategy-mismatch",
            "ValueError: At most one of fp16 and bf16 can be True for full eval, but not both",
        ),
        (
            "model-files",
            "RuntimeError: Unsloth: No config file found - are you sure the `model_name` is correct?",
        ),
        ("zero3-empty-weight", "RuntimeError: size mismatch, got input (2048), mat (2048x1024), vec (0)"),
        ("zero3-empty-weight", "[rank1]: RuntimeError: size mismatch, got input (7), mat (7x64), vec (0)"),
        ("zero3-empty-weight", "RuntimeError: size mismatch, got 96, 96x2560,0"),
        (
            "zero3-empty-weight",
            "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet. "
            "Caffe2 uses a lazy allocation",
        ),
        (
            "changed-in-place",
            "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.",
        ),
        ("different-devices", "RuntimeError: expected device cuda:3 but got device cpu"),
        (
            "quantized-on-another-device",
            "You can't train a model that has been loaded in 4-bit precision with CPU or disk offload",
        ),
        ("zero3-empty-weight", "RuntimeError: shape '[-1, 0]' is invalid for input of size 8192"),
        (
            "gpu-hardware",
            "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        ),
        ("gpu-hardware", "torch.AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink"),
        ("gpu-hardware", "RuntimeError: CUDA error: hardware stack error"),
        ("peer-access", "Cuda failure 217 'peer access is not supported between these two devices'"),
        ("peer-access", "RuntimeError: CUDA error: peer access is not supported between these two devices"),
        ("peer-access", "RuntimeError: CUDA error: peer mapping resources exhausted"),
        ("no-trained-parameters", "ValueError: optimizer got an empty parameter list"),
        ("launcher-unknown", "NotImplementedError: Unknown launcher standard"),
        ("launcher-unknown", "NotImplementedError: Unknown launcher torchrun"),
        ("tensor-without-device", "[rank0]: RuntimeError: tensor does not have a device"),
        ("argument-value", "accelerate: error: argument --num_processes: expected one argument"),
        ("argument-value", "train.py: error: argument --gpus: expected at least one argument"),
        ("argument-value", "torchrun: error: argument --nnodes: invalid int value: ''"),
        (
            "argument-value",
            "fit.py: error: argument --optim: invalid choice: 'adam2' (choose from 'adamw', 'sgd')",
        ),
        ("argument-value", "Error: Option '--steps' requires an argument."),
        ("arguments", "fit.py: error: argument --bf16: not allowed with argument --fp16"),
        ("arguments", "fit.py: error: the following arguments are required: --model"),
        ("hostfile", "ValueError: No slot '3' specified on host 'node2'"),
        ("hostfile", "ValueError: Hostname 'node9' not found in hostfile"),
        ("file-exists", "FileExistsError: [Errno 17] File exists: 'out/logs'"),
        ("kernel-time-limit", "RuntimeError: CUDA error: the launch timed out and was terminated"),
        (
            "collective-mismatch",
            "error msg: Culprit rank 4; Error type: COLLECTIVE_TYPE_MISMATCH, Expected op",
        ),
        ("different-dtypes", "TypeError: output tensor must have the same type as input tensor."),
        ("zero-needs-optimizer", "AssertionError: must provide optimizer during init in order to use step"),
        (
            "changed-in-place",
            "RuntimeError: Output 1 of SplitBackward0 is a view and has been modified inplace.",
        ),
        (
            "peer-lost",
            "RuntimeError: Rank 2 reached monitoredBarrier. Please check rank 0 logs for faulty rank.",
        ),
    ],
)
def test_failure_is_named_by_each_of_its_messages(failure: str, line: str) -> None:
    assert _cause(f"step 4\n{line}\nbye\n") == failure


@pytest.mark.parametrize(
    ("failure", "exception", "frame"),
    [
        (
            "no-trained-parameters",
            "ValueError: max() arg is an empty sequence",
            'deepspeed/runtime/zero/stage3.py", line 9, in initialize_optimizer_states',
        ),
        (
            "no-trained-parameters",
            "RuntimeError: torch.cat(): expected a non-empty list of Tensors",
            'torch/_utils.py", line 9, in _flatten_dense_tensors',
        ),
        (
            "no-trained-parameters",
            "NotImplementedError: There were no tensor arguments: expected a non-empty list of Tensors",
            'deepspeed/runtime/zero/stage_1_and_2.py", line 9, in __init__',
        ),
        (
            "read-only-file-system",
            "RuntimeError: File out/step-9.pt cannot be opened.",
            'torch/serialization.py", line 9, in __init__',
        ),
        (
            "read-only-file-system",
            "RuntimeError: Parent directory runs/a does not exist.",
            'torch/serialization.py", line 9, in __init__',
        ),
        (
            "zero3-empty-weight",
            "IndexError: tuple index out of range",
            'peft/tuners/lora/layer.py", line 9, in _get_in_out_features',
        ),
        (
            "resume-world-size",
            "RuntimeError: The size of tensor a (1024) must match the size of tensor b (4096) at dimension 0",
            'deepspeed/runtime/zero/stage_1_and_2.py", line 9, in _restore_from_bit16_weights',
        ),
        (
            "shapes-differ",
            "RuntimeError: The size of tensor a (1024) must match the size of tensor b (4096) at dimension 0",
            'transformers/models/llama/modeling_llama.py", line 9, in forward',
        ),
        ("fsdp", "AssertionError: Expects FORWARD", 'torch/distributed/utils.py", line 9, in _p_assert'),
    ],
)
def test_failure_is_named_by_its_message_where_it_is_raised(failure: str, exception: str, frame: str) -> None:
    assert _cause(_raised(exception, frame)) == failure


@pytest.mark.parametrize(
    "line",
    [
        "[2025-01-02 03:04:05,678] [INFO] [runner.py:9:main] Using launcher pdsh, hostfile /job/hostfile",
        "[INFO|2025-02-02 12:00:00] llamafactory.launcher:143 >> Initializing 8 distributed tasks",
        "[2025-01-02 03:04:05,678] [WARNING] [runner.py:9:fetch_hostfile] Unable to find hostfile",
        "n:1:1 [0] NCCL INFO P2P is disabled between NVLINK connected GPUs: peer access is off",
        "[2025-01-02 03:04:05,678] [INFO] Checkpoint folder exists already, resuming",
        "optimizer: AdamW, 0 empty parameter groups left out",
        "UserWarning: 'CUDA error: ' messages may come from an earlier kernel",
    ],
)
def test_messages_like_them_are_no_failures(line: str) -> None:
    assert _cause(f"step 4\n{line}\n{{'loss': 1.2}}\n") is None
