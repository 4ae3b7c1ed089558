"""Starts the recorder in each Python process that has this folder on PYTHONPATH and RECORD_TRAINING set.

The process in which zerofit captures a script trains nothing, and is left alone.
"""

import os
import sys

_FOLDER = os.environ.get("RECORD_TRAINING")
if _FOLDER and not any(word.startswith("zerofit.scripts.capture.child") for word in sys.orig_argv):
    from training_recorder import install

    install(_FOLDER)
