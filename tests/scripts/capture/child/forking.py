"""Captures scripts one after another, each in a fork of this process.

Its argument is a JSON list of pairs: where train.py stands, and the capture's folder. The libraries are
imported once, which takes most of a capture's time.
"""

from __future__ import annotations

import gc
import json
import os
import sys


def main() -> None:
    """Run each job's train.py in its place, and print the exit codes."""
    import accelerate
    import datasets
    import deepspeed
    import peft
    import transformers.trainer_seq2seq

    assert all((accelerate, datasets, deepspeed, peft, transformers))
    from zerofit.scripts.capture.child.__main__ import main as capture

    gc.freeze()  # the forks' collections leave the libraries' objects, and their pages, alone
    codes = []
    for place, folder in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            os.chdir(place)
            output = os.open("output", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            capture([folder, "train.py"])
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
