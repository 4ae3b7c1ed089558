"""captured: a context manager for verbs around a captured script, which reports progress and leftovers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.cache_folder import cache_folder
from zerofit.machine.versions import check_libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.facts import GpuSpec
    from zerofit.core.observer import Observer
    from zerofit.scripts.capture.capture import CapturedScript


@contextmanager
def captured(
    target: tuple[str, ...],
    *,
    limit_s: float,
    instead: str,
    retry: Callable[[float], str],
    observer: Observer,
    gpus: tuple[GpuSpec, ...] = (),
    own_folders: tuple[Path, ...] = (),
) -> Iterator[CapturedScript]:
    """Run a script up to where its training would begin, and keep its model for the duration of the context.

    Args:
        target: the script or `-m module`, and its arguments.
        limit_s: time limit.
        instead: the verb's flags that avoid a capture, as the end of a sentence.
        retry: returns what to type for a longer time limit.
        observer: reports that the script runs, and what it left behind.
        gpus: of the planned node; the script's own code sees them.
        own_folders: outputs of the run itself; changes in them don't invalidate a cached capture.

    Raises:
        UserError: training was not reached; the message names the flags that avoid a capture.
    """
    from zerofit.scripts.capture.capture import capture_script

    check_libraries(observer)
    script = capture_script(
        target,
        environment=os.environ,
        cwd=Path.cwd(),
        limit_s=limit_s,
        cache_folder=cache_folder(os.environ, Path.home()),
        observer=observer,
        gpus=gpus,
        own_folders=own_folders,
        instead=instead,
        retry=retry,
    )
    with script:
        yield script
    for sentence in script.left:
        observer.say(sentence)
