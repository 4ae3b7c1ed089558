"""Waits with a child of its own; its arguments name the signals it ignores."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"])
rank = os.environ.get("RANK", "0")
Path(f"waiting{rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
Path(f"waiting{rank}.tmp").rename(f"waiting{rank}")
time.sleep(300)
