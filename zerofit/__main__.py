"""python -m zerofit."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder: its secrets.py or signal.py would replace the standard library's

from zerofit.cli.main import main

if __name__ == "__main__":
    main()
