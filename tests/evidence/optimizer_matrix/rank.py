"""One of the two ranks: reads a case a line from stdin, trains it, and writes what came out to a descriptor.

Stock accelerate and DeepSpeed run here: of zerofit nothing but names.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from functools import cache
from typing import Any

from optimizer_matrix.cases import case_from_json
from zerofit.core.command import Route


def main(results_descriptor: int) -> None:
    """Train cases until stdin ends."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    from accelerate import PartialState
    from harness.rank import default_to_gloo

    from optimizer_matrix.train import relative_error, train_case, train_reference

    torch.set_num_threads(1)
    _save_time()
    default_to_gloo()
    PartialState()

    references: dict[tuple[str, bool], list[torch.Tensor]] = {}

    def run(values: dict[str, Any]) -> dict[str, Any]:
        case = case_from_json(values)
        try:
            trained = train_case(case, rank=rank, num_ranks=num_ranks)
        except Exception as error:
            return {"raised": _in_words(error)}
        known = case.optimizer, case.route is Route.TRAINER
        try:
            if known not in references:
                references[known] = train_reference(case, num_ranks=num_ranks)
        except Exception as error:
            return {"reference_error": _in_words(error)}
        error = relative_error(trained.weights, references[known])
        return {"stepped": trained.stepped, "is_own": trained.is_own, "error": error}

    with os.fdopen(results_descriptor, "w") as results:
        print(json.dumps({"ready": True}), file=results, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line))), file=results, flush=True)


def _save_time() -> None:
    """Leave out what takes seconds in each case and changes nothing: the CPU's name, garbage of imports."""
    import cpuinfo
    import deepspeed
    import transformers  # noqa: F401 - before the freeze

    deepspeed.logger.setLevel("ERROR")
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    gc.collect()
    gc.freeze()


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


if __name__ == "__main__":
    main(int(sys.argv[1]))
