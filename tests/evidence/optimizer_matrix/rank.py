"""One of the two ranks: trains a case, and says how far it comes from the reference.

Stock accelerate and DeepSpeed run here: of zerofit nothing but names.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from measuring_ranks import in_words, serve

from optimizer_matrix.cases import Case
from zerofit.core.command import Route
from zerofit.core.validation import parse_strictly

if TYPE_CHECKING:
    import torch

_REFERENCES: dict[tuple[str, bool], list[torch.Tensor]] = {}


def _measure(values: dict[str, Any]) -> dict[str, Any]:
    from optimizer_matrix.train import relative_error, train_case, train_reference

    case = parse_strictly(Case, json.dumps(values))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trained = train_case(case, rank=rank, num_ranks=num_ranks)
    known = case.optimizer, case.route is Route.TRAINER
    try:
        if known not in _REFERENCES:
            _REFERENCES[known] = train_reference(case, num_ranks=num_ranks)
    except Exception as error:
        return {"reference_error": in_words(error)}
    error = relative_error(trained.weights, _REFERENCES[known])
    return {"stepped": trained.stepped, "is_own": trained.is_own, "error": error}


if __name__ == "__main__":
    serve(_measure)
