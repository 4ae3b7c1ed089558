"""Runs zerofit's main() for many command lines in one process, as transformers takes seconds to import.

Reads a JSON list of command lines from standard input; writes a JSON object a line: how each ended, what it
wrote, and which heavy packages were imported by then.
"""

import json
import os
import sys
import tempfile
import traceback

from zerofit.cli.main import main


def run(arguments: list[str]) -> dict[str, object]:
    """Run a command line; what it starts writes into the same files as itself."""
    own = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        sys.argv = ["zerofit", *arguments]
        try:
            main()
        except SystemExit as end:
            exit_code = end.code
        except BaseException:  # as Python itself does with it
            traceback.print_exc()
            exit_code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(own[0], 1)
            os.dup2(own[1], 2)
        stdout.seek(0)
        stderr.seek(0)
        return {
            "exit_code": exit_code,
            "stdout": stdout.read().decode(),
            "stderr": stderr.read().decode(),
            "imported": sorted({"torch", "transformers"} & sys.modules.keys()),
        }


for line in json.load(sys.stdin):
    print(json.dumps(run(line)), flush=True)
