"""One rank: measures the cases of a file, and writes one line for each."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from functools import cache
from pathlib import Path

from memory.cases import CASES


def main(keys_file: str, results_file: str) -> None:
    """Measure the cases whose keys a file lists."""
    import torch
    from accelerate import PartialState

    from memory.collectives import use_copies

    torch.set_num_threads(1)
    use_copies()
    PartialState(backend="gloo")
    _save_time()
    from memory.train import measure

    gc.collect()
    gc.freeze()  # each phase ends with a collection
    by_key = {case.key: case for case in CASES}
    with Path(results_file).open("a", encoding="utf-8") as results:
        for key in Path(keys_file).read_text(encoding="utf-8").split():
            try:
                found = measure(by_key[key])
            except Exception as error:
                traceback.print_exc()
                found = {"raised": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps({"key": key, **found}), file=results, flush=True)
            torch.distributed.barrier()
    os._exit(0)


def _save_time() -> None:
    """Leave out what takes seconds in each case and changes nothing: the CPU's name."""
    import cpuinfo
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)


if __name__ == "__main__":
    main(*sys.argv[1:])
