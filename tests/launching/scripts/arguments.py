"""Prints its arguments."""

import json
import sys

print(json.dumps(sys.argv[1:]))
