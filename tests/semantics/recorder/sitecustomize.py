"""Starts the recorder in each Python process that has this folder on PYTHONPATH and RECORD_TRAINING set.

The process in which zerofit captures a script trains nothing, and is left alone.
"""

import os
import sys

_FOLDER = os.environ.get("RECORD_TRAINING")
if _FOLDER and not any(word.startswith("zerofit.scripts.capture.child") for word in sys.orig_argv):
    from training_recorder import install

    install(_FOLDER)

if os.environ.get("RECORD_SEED"):
    # For scripts that set no seed: two of their runs would differ by themselves.
    import random

    from zerofit.scripts.on_import import when_imported

    random.seed(1)
    when_imported("torch", lambda module: module.manual_seed(1))
    when_imported("numpy", lambda module: module.random.seed(1))
