"""Trains the rung of a spec file under DeepSpeed, and prints what the rank holds, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from measuring.deepspeed_rank import RankTrainee, import_ahead, joined
from measuring.measure import make_trainee
from measuring.random_model import make_model, make_samples
from measuring.results import spec_from_json


def _held(trainee: RankTrainee) -> dict[str, Any]:
    parameters = list(trainee.model.parameters())
    states = trainee.optimizer.state.values()
    return {
        "whole": [int(getattr(one, "ds_numel", one.numel())) for one in parameters],
        "weights": sum(int(getattr(one, "ds_tensor", one).numel()) for one in parameters),
        "weight_formats": sorted({str(one.dtype) for one in parameters}),
        "first_moments": sum(int(state["exp_avg"].numel()) for state in states),
        "optimizer": type(trainee.optimizer).__name__,
        "ranks": int(trainee.engine.dp_world_size),
        "skipped": int(trainee.engine.skipped_steps),
        "steps": int(trainee.engine.global_steps),
    }


def main(spec_file: str) -> None:
    """Take a step and a timed one."""
    spec = spec_from_json(Path(spec_file).read_text())
    import_ahead(spec, tell=lambda _: None)
    with joined(spec):
        model = make_model(spec, "cpu")
        trainee = make_trainee(model, make_samples(model, spec), spec, "cpu")
        assert isinstance(trainee, RankTrainee)
        trainee.step()
        trainee.timed_step()
        print(json.dumps(_held(trainee)))


if __name__ == "__main__":
    main(sys.argv[1])
