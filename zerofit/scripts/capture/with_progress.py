"""captured: a script captured for a verb, which is told of the progress and of what the script left."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.cache_folder import cache_folder
from zerofit.machine.library_versions import check_libraries
from zerofit.scripts.target import script_words

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
    observer: Observer,
    gpus: tuple[GpuSpec, ...] = (),
) -> Iterator[CapturedScript]:
    """Run a script up to where its training would begin, and hold what it made for as long as the context.

    Args:
        target: the script or `-m module`, and its arguments.
        limit_s: how long it may take.
        instead: which flags of the verb do without, as the end of a sentence.
        observer: is told that the script runs, and what it left.
        gpus: of the node that is planned for; the script's own code is told of them.

    Raises:
        UserError: it does not come to a training; the message says what does without.
    """
    from zerofit.scripts.capture.capture import capture_script

    check_libraries(observer)
    with ExitStack() as running:
        script = capture_script(
            target,
            environment=os.environ,
            cwd=Path.cwd(),
            limit_s=limit_s,
            cache_folder=cache_folder(os.environ, Path.home()),
            instead=instead,
            gpus=gpus,
            **_callbacks(script_words(target), running, observer),
        )
    with script:
        yield script
    for sentence in script.left:
        observer.say(sentence)


def _callbacks(script: str, running: ExitStack, observer: Observer) -> dict[str, Any]:
    """Return what capture_script calls as the script starts, and with each line that it prints."""
    tellers: list[Callable[[str], None]] = []

    def start(is_again: bool) -> None:
        if is_again:
            why = "what it trains is known from before, and its model is needed once more"
            observer.say(f"{script} runs again up to its first step: {why} ...")
            return
        title = f"looking at what {script} trains, up to its first step"
        tellers.append(running.enter_context(observer.task(title, is_announced=True)))

    def tell(line: str) -> None:
        for teller in tellers:
            teller(line)

    return {"on_start": start, "on_progress": tell}
