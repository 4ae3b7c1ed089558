"""The world to facts: machine, versions, toolchain."""
