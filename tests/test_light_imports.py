"""What each command needs at its start imports none of the slow libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")


@pytest.mark.parametrize(
    ("work", "slow"),
    [
        pytest.param(
            "import zerofit; assert not hasattr(zerofit, 'nothing')",
            {"torch", "accelerate", "transformers", "pydantic", "zerofit.training"},
            id="zerofit itself",
        ),
        pytest.param(
            "from zerofit.machine.versions import probe_versions; versions = probe_versions();"
            f"assert None not in [getattr(versions, name) for name in {_LIBRARIES}]",
            {*_LIBRARIES},
            id="installed versions",
        ),
        pytest.param(
            "from zerofit.machine.gpu_catalog import find_gpu; find_gpu('T4')",
            {"torch", "transformers", "pydantic", "psutil"},
            id="catalog of GPUs",
        ),
        pytest.param(
            "from zerofit.machine.this_node import probe_machine; probe_machine()",
            {"torch", "accelerate", "deepspeed", "transformers", "pydantic"},
            id="this machine",
        ),
        pytest.param(
            "from zerofit.configs.schemas.catalog import load_schemas; load_schemas()",
            {"pydantic", "torch", "deepspeed", "yaml"},
            id="schemas",
        ),
        pytest.param(
            "from zerofit.models.find import probe_model; probe_model('llama-3-8b')",
            {"torch", "transformers", "huggingface_hub"},
            id="model of the catalog",
        ),
        pytest.param(
            "from zerofit.planning.estimate.closed_form.log import closed_form_log;"
            "from zerofit.planning.estimate.step_time import estimate_step_time;"
            "from zerofit.machine.rates import catalog_rates; catalog_rates()",
            {"torch"},
            id="closed forms",
        ),
    ],
)
def test_nothing_slow_is_imported(work: str, slow: set[str]) -> None:
    program = f"import sys; {work}; print(sorted({slow} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
