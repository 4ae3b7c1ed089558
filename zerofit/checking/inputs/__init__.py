"""The layers of a run, files, flags and script, to the one Situation that the rules look at."""
