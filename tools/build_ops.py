"""Compiles DeepSpeed's ops for CPU ranks: `python tools/build_ops.py ShareMemCommBuilder CPUAdamBuilder`.

They go into $TORCH_EXTENSIONS_DIR, or into the cache of the user's home folder, where every new home compiles
them again. Each takes half a minute on two cores; one that is there already is left as it is.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    for builder in sys.argv[1:]:
        get_accelerator().create_op_builder(builder).load(verbose=False)
