"""Ends in the way that its argument names, on the rank that its second argument names."""

import os
import signal
import sys
import time

how, rank = sys.argv[1], sys.argv[2]
print(f"last words of rank {os.environ.get('RANK', '0')}", flush=True)
if os.environ.get("RANK", "0") == rank:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError("the script's own error")
    if how == "text":
        sys.exit("the script's own text")
    sys.exit(int(how))
time.sleep(0 if how == "0" else 120)
