"""The mutation run: one small change to the code at a time, and whether a test fails by it."""
