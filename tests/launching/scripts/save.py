"""Trains until a signal asks it to stop, saves for 6 s, and writes down which signals it was sent."""

import os
import signal
import time
from pathlib import Path

received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
rank = os.environ.get("RANK", "0")
Path(f"waiting{rank}.tmp").write_text(str(os.getpid()))
Path(f"waiting{rank}.tmp").rename(f"waiting{rank}")
while not received:
    time.sleep(0.05)
time.sleep(6)
Path(f"saved{rank}").write_text(" ".join(received))
