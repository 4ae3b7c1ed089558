"""What each command needs at its start imports none of the slow libraries."""

from __future__ import annotations

import subprocess
import sys

_LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")
_STEPS = (
    (
        "import zerofit; assert not hasattr(zerofit, 'nothing')",
        {"torch", "accelerate", "transformers", "pydantic", "zerofit.training"},
    ),
    (
        "from zerofit.machine.versions import probe_versions; versions = probe_versions();"
        f"assert None not in [getattr(versions, name) for name in {_LIBRARIES}]",
        {*_LIBRARIES},
    ),
    (
        "from zerofit.machine.gpu_catalog import find_gpu; find_gpu('T4')",
        {"torch", "transformers", "pydantic", "psutil"},
    ),
    (
        "from zerofit.configs.schemas.catalog import load_schemas; load_schemas()",
        {"pydantic", "torch", "deepspeed", "yaml"},
    ),
    (
        "from zerofit.models.find import probe_model; probe_model('llama-3-8b')",
        {"torch", "transformers", "huggingface_hub"},
    ),
    (
        "from zerofit.machine.this_node import probe_machine; probe_machine()",
        {"torch", "accelerate", "deepspeed", "transformers", "pydantic"},
    ),
    (
        "from zerofit.planning.estimate.closed_form.log import closed_form_log;"
        "from zerofit.planning.estimate.step_time import estimate_step_time;"
        "from zerofit.machine.rates import catalog_rates; catalog_rates()",
        {"torch"},
    ),
)
"""What is done one after the other in one process, and what must not be imported after it."""


def test_nothing_slow_is_imported() -> None:
    program = "import sys\n" + "\n".join(
        f"{work}\nprint(sorted({slow} & sys.modules.keys()))" for work, slow in _STEPS
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.stderr) == (["[]"] * len(_STEPS), "")
