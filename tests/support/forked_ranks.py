"""Run as a program: runs a script on CPU ranks, forks of one process that has imported the libraries.

Usage: forked_ranks.py NUM_RANKS SCRIPT [ARGUMENT ...]. Importing takes most of a small rank's time. As with
torchrun, one rank that fails ends the others.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import sys


def main() -> int:
    """Run the ranks, and return the exit code of the first that failed, or 0."""
    import accelerate
    import deepspeed
    import peft
    import transformers.trainer

    assert all((accelerate, deepspeed, peft, transformers))
    num_ranks, sys.argv[:] = int(sys.argv[1]), sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    gc.freeze()
    ranks = {_start(rank, num_ranks, port) for rank in range(num_ranks)}
    code = 0
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status and not code:
            code = abs(os.waitstatus_to_exitcode(status))
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
    return code


def _start(rank: int, num_ranks: int, port: int) -> int:
    """Fork a rank, and return its process id."""
    if child := os.fork():
        return child
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    sys.exit(main())
