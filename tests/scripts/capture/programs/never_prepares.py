"""Makes an Accelerator and prepares nothing with it."""

from accelerate import Accelerator

print("on", Accelerator().device)
