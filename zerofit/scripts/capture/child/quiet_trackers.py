"""Silences experiment trackers in a captured script, by stand-ins for their runs."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from zerofit.scripts.on_import import when_imported

if TYPE_CHECKING:
    from collections.abc import Iterable

_RUNS = ("wandb", "swanlab", "trackio")
"""Trackers with init(config=...), whose configuration scripts read back, and a current run."""
_SENDERS = {
    "wandb": ("Artifact", "Run", "Table"),
    "swanlab": ("Run",),
    "trackio": ("Run",),
    "mlflow": ("MlflowClient",),
    "mlflow.tracking": ("MlflowClient",),
    "comet_ml": ("API", "Experiment", "ExistingExperiment", "OfflineExperiment", "ExistingOfflineExperiment"),
    "neptune": ("Run", "Model", "ModelVersion", "Project"),
    "aim": ("Run", "Repo"),
    "clearml": ("Task", "Logger", "Dataset"),
    "dvclive": ("Live",),
}
"""Tracker libraries of which every function is silenced, and these classes.

Source: their public names; comet_ml's start() and neptune's init_run() are functions.
"""
_FLAVORS = ("mlflow.pytorch", "mlflow.transformers")
_LOGS = ("autolog", "log_model", "save_model")
"""mlflow's modules and functions that write models (https://mlflow.org/docs/latest/ml)."""


def install() -> None:
    """Install the hooks on accelerate's trackers, and on those that a script calls directly."""
    when_imported("accelerate.accelerator", _quiet_accelerator)
    for name, classes in _SENDERS.items():
        when_imported(name, functools.partial(_quiet_library, classes=classes))
    for name in _FLAVORS:
        when_imported(name, lambda module: _silence(module, [log for log in _LOGS if hasattr(module, log)]))


class Config(dict[str, Any]):
    """A run's configuration as in wandb: a dict whose items are also attributes."""

    def __init__(self, given: Any = None) -> None:
        super().__init__()
        self.update(given)

    def update(self, given: Any = None, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Add the items of a mapping, or of a script's parsed arguments."""
        if hasattr(given, "items"):
            super().update(given.items())
        elif hasattr(given, "__dict__"):
            super().update(vars(given))

    def setdefaults(self, given: Any) -> None:
        """Add the missing items."""
        super().update({**Config(given), **self})

    def as_dict(self) -> dict[str, Any]:
        """Return the items."""
        return dict(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def silent_run(name: str = "", config: Any = None) -> Any:
    """Return a run, or an accelerate tracker, that accepts everything and stores its configuration."""
    run = MagicMock()
    run.name = run.id = run.project = name or "run"
    run.info.run_id = run.info.run_name = "run"
    run.dir = "."
    run.step = 0
    run.summary = {}
    run.config = Config(config)
    run.__enter__.return_value = run
    return run


def _quiet_library(module: ModuleType, *, classes: tuple[str, ...]) -> None:
    root = module.__name__.partition(".")[0]
    public = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    calls = [
        name
        for name, value in public
        if callable(value) and not inspect.isclass(value) and not isinstance(value, ModuleType)
    ]
    _silence(module, calls)
    for name in classes:
        made = getattr(module, name, None)  # some are imported lazily
        if inspect.isclass(made) and made.__module__.partition(".")[0] == root:
            _silence_class(made)
    if root in _RUNS:
        _keep_config(module)


def _keep_config(module: Any) -> None:
    """Give a tracker's module an init() whose run stores the script's configuration."""
    module.run, module.config = None, Config()

    def init(*_: Any, config: Any = None, **__: Any) -> Any:
        run = silent_run(config=config)
        module.run, module.config = run, run.config
        return run

    module.init = init


def _silence(holder: Any, names: Iterable[str]) -> None:
    for name in names:
        setattr(holder, name, _silent)


def _silent(*_: Any, **__: Any) -> Any:
    return silent_run()


def _silence_class(made: Any) -> None:
    """Silence all methods of a class, which stays valid for the script's isinstance() checks."""
    methods = [name for name in dir(made) if not name.startswith("_")]
    _silence(made, methods)
    made.__init__ = lambda *_, **__: None
    made.__getattr__ = lambda *_: silent_run()
    made.__setitem__ = lambda *_: None
    made.__getitem__ = made.__enter__ = _silent
    made.__exit__ = lambda *_: None
    made.__del__ = lambda *_: None
    if "connect" in methods:  # clearml's, which returns its argument
        made.connect = lambda _, given, *__, **___: given


def _quiet_accelerator(module: Any) -> None:
    """Give an Accelerator one silent tracker for each that the script requests."""

    def init_trackers(self: Any, project_name: str, config: Any = None, *_: Any, **__: Any) -> None:
        names = [
            getattr(tracker, "name", None) or str(getattr(tracker, "value", tracker))
            for tracker in self.log_with
        ]
        self.trackers = [silent_tracker(name, config) for name in names]

    module.Accelerator.init_trackers = init_trackers


def silent_tracker(name: str, config: Any = None) -> Any:
    """Return a replacement for one of accelerate's trackers; `tracker` is its run."""
    tracker = silent_run(name, config)
    tracker.tracker = tracker.run = silent_run(config=config)
    return tracker
