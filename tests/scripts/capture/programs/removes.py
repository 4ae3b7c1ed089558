"""Removes what an earlier run left."""

import os

print("fresh start")
open("new.txt", "w").close()
os.remove("old.txt")
