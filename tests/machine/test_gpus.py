"""The GPUs of probe_machine, against a fake NVML."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec
from zerofit.core.units import GIB
from zerofit.machine.gpus import probe_driver, probe_gpus, visible_indices
from zerofit.machine.this_node import probe_machine
from zerofit.machine.toolchain import Driver

_UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444")


@pytest.mark.parametrize(
    ("visible_devices", "indices"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("-1", ()),
        (" 1 , 3 ", (1, 3)),
        ("0,7,1", (0,)),
        ("0,-1,1", (0,)),
        ("0,1,0", ()),
        ("GPU-bbbb3333", (2,)),
        ("GPU-cccc,GPU-aaaa1", (3, 0)),
        ("GPU-aaaa", ()),
        ("MIG-aaaa1111", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    visible_devices: str | None, indices: tuple[int, ...]
) -> None:
    assert visible_indices(visible_devices, _UUIDS) == indices


class _NvmlError(Exception):
    pass


class _FakeNvml:
    """Stands for pynvml with four GPUs, one of them lost: no machine of the test suite has a GPU.

    It tells nothing of links, as in many virtual machines; test_gpu_links.py has one that does.
    """

    NVMLError = _NvmlError
    _names = ("A", "A", "B", None)

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.product_names: dict[str | None, str] = {}
        self.num_started = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise _NvmlError("Driver Not Loaded")
        self.num_started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_started -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if self._names[index] is None:
            raise _NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return _UUIDS[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        name = self._names[handle]
        return f"NVIDIA {self.product_names.get(name, name)}"

    nvmlMemory_v2 = 2  # noqa: N815

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int = 1) -> SimpleNamespace:  # noqa: N802
        if self._names[handle] == "A":
            return SimpleNamespace(total=80 * GIB, **({"reserved": GIB} if version == 2 else {}))
        if version == 2:
            raise _NvmlError("Function Not Found")
        return SimpleNamespace(total=24 * GIB)

    NVML_P2P_CAPS_INDEX_NVLINK = 2

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        raise _NvmlError("Not Supported")

    def nvmlDeviceGetP2PStatus(self, handle: int, other: int, capability: int) -> int:  # noqa: N802
        raise _NvmlError("Not Supported")

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return (8, 0) if self._names[handle] == "A" else (7, 5)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "550.54.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 12040


_A = GpuSpec(name="NVIDIA A", memory_bytes=80 * GIB, reserved_bytes=GIB, compute_capability=(8, 0))
_B = GpuSpec(name="NVIDIA B", memory_bytes=24 * GIB, compute_capability=(7, 5))


@pytest.mark.parametrize(
    ("environ", "gpu_ids", "gpus"),
    [
        pytest.param({}, None, (_A, _A, _B), id="all that answer"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "2,0"}, None, (_B, _A), id="in the user's order"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, None, (), id="an empty list hides all"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, None, (_B,), id="by UUID"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0"}, (1, 2), (_A, _B), id="--gpu-ids takes precedence"),
    ],
)
def test_gpus_are_those_that_the_run_would_see(
    environ: dict[str, str], gpu_ids: tuple[int, ...] | None, gpus: tuple[GpuSpec, ...]
) -> None:
    nvml = _FakeNvml()
    assert probe_machine(gpu_ids=gpu_ids, environ=environ, nvml=nvml).gpus == gpus
    assert nvml.num_started == 0


def test_a_gpu_of_the_catalog_gets_its_rates_and_keeps_its_memory() -> None:
    nvml = _FakeNvml()
    nvml.product_names = {"A": "A100-SXM4-80GB"}
    (gpu,) = probe_machine(gpu_ids=(0,), environ={}, nvml=nvml).gpus
    assert (gpu.memory_bytes, gpu.usable_bytes) == (80 * GIB, 79 * GIB)
    assert (gpu.bf16_flops_per_s, gpu.peer_bytes_per_s, gpu.host_bytes_per_s) == (312e12, 300e9, 31.5e9)


def test_driver_states_its_own_version_and_the_newest_cuda() -> None:
    assert probe_driver(nvml=_FakeNvml()) == Driver(version="550.54.15", cuda_version=(12, 4), num_gpus=4)


def _gpus(root: Path, visible_devices: str | None, nvml: _FakeNvml, **options: Any) -> tuple[GpuSpec, ...]:
    return probe_gpus(gpu_ids=None, visible_devices=visible_devices, root=root, nvml=nvml, **options)


def test_no_driver_means_no_gpus(tmp_path: Path) -> None:
    nvml = _FakeNvml(has_driver=False)
    assert _gpus(tmp_path, None, nvml) == ()
    assert probe_driver(nvml=nvml) is None


@pytest.mark.parametrize("visible_devices", ["", " ", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose_are_no_mistake(tmp_path: Path, visible_devices: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert _gpus(tmp_path, visible_devices, _FakeNvml()) == ()
    assert _gpus(tmp_path, visible_devices, _FakeNvml(has_driver=False)) == ()


@pytest.mark.parametrize(
    ("visible_devices", "has_driver", "message"),
    [
        (
            "MIG-aaaa1111",
            True,
            "error[gpus-unreadable]: GPUs are asked for or present, and none can be read\n"
            "  found: CUDA_VISIBLE_DEVICES=MIG-aaaa1111, which names no GPU that the driver lists\n"
            "  why:   the run would train on the CPU without a word; parts of a GPU (MIG) are not understood "
            "yet\n"
            "  fix:   name GPUs by number or UUID as nvidia-smi -L lists them, or say --cpu to "
            "train on the CPU",
        ),
        (
            None,
            False,
            "error[gpus-unreadable]: GPUs are asked for or present, and none can be read\n"
            "  found: /dev/nvidia0, and the driver lists no GPU that answers\n"
            "  why:   the run would train on the CPU without a word\n"
            "  fix:   make nvidia-smi list the GPUs, or say --cpu to train on the CPU",
        ),
    ],
)
def test_gpus_that_can_not_be_read_are_refused_unless_that_is_allowed(
    tmp_path: Path, visible_devices: str | None, has_driver: bool, message: str
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / "dev" / name).touch()
    nvml = _FakeNvml(has_driver=has_driver)
    with pytest.raises(UserError) as caught:
        _gpus(tmp_path, visible_devices, nvml)
    assert str(caught.value) == message
    assert _gpus(tmp_path, visible_devices, nvml, may_be_unreadable=True) == ()


@pytest.mark.parametrize(
    ("gpu_ids", "has_driver", "found"),
    [
        ((0, 7), True, "--gpu-ids 0,7; the driver lists 0 to 3"),
        ((1, 1), True, "--gpu-ids 1,1; the driver lists 0 to 3"),
        ((-1,), True, "--gpu-ids -1; the driver lists 0 to 3"),
    ],
)
def test_wrong_gpu_ids_are_refused(gpu_ids: tuple[int, ...], has_driver: bool, found: str) -> None:
    with pytest.raises(UserError) as caught:
        probe_machine(gpu_ids=gpu_ids, environ={}, nvml=_FakeNvml(has_driver=has_driver))
    assert str(caught.value) == (
        "error[gpu-ids-unknown]: --gpu-ids must name GPUs of this machine, each once\n"
        f"  found: {found}\n"
        "  why:   CUDA drops the ids from the first wrong one on, and all of them where one stands twice\n"
        "  fix:   leave out --gpu-ids, or name ids that nvidia-smi lists"
    )
