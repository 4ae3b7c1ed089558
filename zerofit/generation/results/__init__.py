"""The folder in which a generation keeps its results, so that it can go on after a kill."""
