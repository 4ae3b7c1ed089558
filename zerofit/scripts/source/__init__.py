"""A script's source to ScriptFacts, by its syntax tree: nothing is run or imported."""
