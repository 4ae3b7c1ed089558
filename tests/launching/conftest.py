"""Real launches: the fixtures that the tests of this folder share."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest
from example_runs import (
    GLOBAL_BATCH_SIZE,
    Losses,
    PlainLosses,
    accelerate_example,
    accelerate_losses,
    plain_accelerate_launch,
    trainer_example,
    trainer_losses,
)
from parallel_dimensions import Runs, save_model, script
from runs import Run, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Run]:
    """Run `zerofit launch --cpu` with these arguments, in a folder of its own."""

    def run(*arguments: str, **more: str) -> Run:
        command = [sys.executable, "-m", "zerofit", "launch", "--cpu", *arguments]
        return run_command(command, tmp_path, **more)

    return run


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' cache of tokenized text and untrained models, made once a session."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session", autouse=True)
def _ops(built_ops: None) -> None:
    """Build DeepSpeed's ops first."""


@pytest.fixture(scope="session")
def plain_losses(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainLosses:
    """Losses of an example, by route and more arguments, under the stock launcher in one process."""
    examples = {
        "accelerate": (accelerate_example, accelerate_losses),
        "trainer": (trainer_example, trainer_losses),
    }

    @cache
    def of(route: str, arguments: tuple[str, ...] = ()) -> Losses:
        folder = tmp_path_factory.mktemp(f"plain-{route}")
        command, losses = examples[route]
        plain_accelerate_launch([*command(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE), *arguments], folder)
        return losses(folder)

    return of


@pytest.fixture(scope="session")
def plain_accelerate(plain_losses: PlainLosses) -> Losses:
    """Losses of the accelerate example under the stock launcher, in one process."""
    return plain_losses("accelerate")


@pytest.fixture(scope="session")
def plain_trainer(plain_losses: PlainLosses) -> Losses:
    """Losses of the Trainer example under the stock launcher, in one process."""
    return plain_losses("trainer")


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save an untrained model of a kind once, and return its folder."""
    folder = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        path = folder / kind.replace(" ", "-")
        if not path.exists():
            save_model(kind, path)
        return path

    return make


@pytest.fixture(scope="session")
def one_process(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Train in one process without zerofit, once for each model, and return what that wrote."""
    done: dict[tuple[str, ...], Path] = {}

    def train(kind: str, *arguments: str) -> Path:
        key = (kind, *arguments)
        if key not in done:
            folder = tmp_path_factory.mktemp("one-process")
            run_command(
                [sys.executable, *script(model_of(kind), *arguments)], folder, ACCELERATE_USE_CPU="true"
            ).check()
            done[key] = folder / "out"
        return done[key]

    return train


@pytest.fixture
def runs(
    launch: Callable[..., Run], model_of: Callable[[str], Path], one_process: Callable[..., Path]
) -> Runs:
    """Launches of the script of several dimensions, and its runs in one process."""
    return Runs(launch=launch, model_of=model_of, one_process=one_process)
