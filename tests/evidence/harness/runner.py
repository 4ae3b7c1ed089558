"""Runs examples and keeps what they did: the server's client, with a cache by content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring_ranks import free_port

from harness.observe import START
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import numpy

    from harness.layout import Run

LIMIT_S = 90.0
"""Of a run that should end. Alone on two cores the slowest takes five seconds."""
_HARNESS = Path(__file__).parent
_OF_RANKS = {"DS_ACCELERATOR": "cpu"}
_OF_REFERENCE = {"ACCELERATE_USE_CPU": "true", "RANK": "0", "WORLD_SIZE": "1"}
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "TORCH_EXTENSIONS_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended, and what it did."""

    exit_code: int | None
    """None: it was still alive at the limit."""
    seconds: float
    text: str
    """All that launcher and ranks printed."""
    observed: Mapping[str, Any] = field(default_factory=dict)
    """What rank 0's engine showed at the end, and "left NAME" for each file of its folder.

    Empty where it did not end well.
    """
    folder: Path
    """Files, logs, and weights.npz."""

    @property
    def start(self) -> Path | None:
        """The weights before the first step; None of a run that made no engine."""
        path = self.folder / START
        return path if path.exists() else None

    def weights(self, moment: str = "last") -> dict[str, numpy.ndarray]:
        """Return the whole parameters at the end of the run, or, of a reference, at its start ("first")."""
        import numpy

        path = self.folder / "weights.npz"
        if not path.exists():
            return {}
        with numpy.load(path) as arrays:
            prefix = f"{moment}/"
            return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


class Runner:
    """Runs in one server process, which is started with the first run that the cache does not have."""

    def __init__(self, cache: Path, *, anew: bool = False) -> None:
        self._cache = cache
        self._anew = anew
        self._done: set[Path] = set()
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            assert self._server.stdin
            self._server.stdin.close()
            self._server.wait(timeout=30)

    def run(self, run: Run, *, asks: Sequence[str] = (), limit_s: float = LIMIT_S) -> Ended:
        """Run to the end or the limit.

        Args:
            run: what to run.
            asks: observations to make beside the standard ones.
            limit_s: when to end it.
        """
        folder = self._cache / _key(run, asks, limit_s)
        result = folder / "result.json"
        if folder not in self._done and (self._anew or not result.exists()):
            partial = folder.with_suffix(f".{os.getpid()}")
            reply = self._start(run, partial, asks, limit_s)
            (partial / result.name).write_text(json.dumps(reply), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        self._done.add(folder)
        return _ended(folder, json.loads(result.read_text(encoding="utf-8")))

    def _start(self, run: Run, folder: Path, asks: Sequence[str], limit_s: float) -> dict[str, Any]:
        if run.before is not None:
            before = self._start(run.before, folder, (), LIMIT_S)
            assert before["exit_code"] == 0, _ended(folder, before).text
            for left in folder.glob("rank*"):
                left.unlink()
        for name, text in run.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "nvme").mkdir(exist_ok=True)
        if run.start is not None:
            shutil.copy(run.start, folder / START)
        environment = dict(_OF_REFERENCE if run.is_reference else _OF_RANKS)
        if "environment.json" in run.files:
            environment = json.loads(run.files["environment.json"])
        port = free_port()
        command = list(run.command)
        if run.launcher == "accelerate":
            command = ["--main_process_port", str(port), *_without_port(command)]
        elif run.launcher == "deepspeed":
            command = ["--master_port", str(port), *command]
        return self._ask(
            {
                "folder": str(folder),
                "launcher": run.launcher,
                "command": command,
                "num_ranks": run.num_ranks,
                "num_machines": run.num_machines,
                "port": port,
                "environment": environment,
                "is_reference": run.is_reference,
                "as_on_gpus": run.as_on_gpus,
                "shards": run.shards,
                "asks": list(asks),
                "limit_s": limit_s,
            }
        )

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._server is None:
            self._server = _start_server()
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps(job), file=self._server.stdin, flush=True)
        return dict(json.loads(self._server.stdout.readline()))


def _start_server() -> subprocess.Popen[str]:
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # The harness stands in tests/evidence, zerofit beside tests/.
        "PYTHONPATH": os.pathsep.join((str(_HARNESS.parent), str(_HARNESS.parents[2]))),
        # No user's own default_config.yaml may take part.
        "HF_HOME": os.path.join(os.environ.get("TMPDIR", "/tmp"), "zerofit-evidence-hf"),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "harness.server"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout
    if json.loads(server.stdout.readline() or "{}") != {"ready": True}:
        raise RuntimeError("the server of the evidence harness did not start: python -m harness.server")
    return server


def _key(run: Run, asks: Sequence[str], limit_s: float) -> str:
    """Return a name for all that decides what a run does."""
    digest = hashlib.sha256()
    for path in sorted(_HARNESS.glob("*.py")):
        if path.name in ("observe.py", "rank.py", "reference.py", "runner.py", "server.py", "sharding.py"):
            digest.update(path.read_bytes())
    files = {name: text for name, text in run.files.items() if not name.endswith("command.sh")}
    before = _key(run.before, (), LIMIT_S) if run.before is not None else None
    how = (run.launcher, run.command, run.num_ranks, run.num_machines, run.is_reference)
    start = hashlib.sha256(run.start.read_bytes()).hexdigest() if run.start is not None else None
    how = (*how, run.as_on_gpus, run.shards, before, start)
    facts = (files, how, list(asks), limit_s)
    digest.update(json.dumps(facts, default=str).encode())
    digest.update(str(probe_versions()).encode())
    return digest.hexdigest()[:20]


def _without_port(command: list[str]) -> list[str]:
    if "--main_process_port" not in command:
        return command
    index = command.index("--main_process_port")
    return command[:index] + command[index + 2 :]


def _ended(folder: Path, reply: dict[str, Any]) -> Ended:
    logs = [folder / "launcher.log", *sorted(folder.glob("rank*.log"))]
    text = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists())
    rank0 = folder / "rank0.json"
    observed = json.loads(rank0.read_text(encoding="utf-8")).get("observed", {}) if rank0.exists() else {}
    left = {f"left {path.name}": True for path in folder.iterdir()} if observed else {}
    observed = {**left, **observed}
    return Ended(
        exit_code=reply["exit_code"], seconds=reply["seconds"], text=text, observed=observed, folder=folder
    )
