"""Generation with every rank in step: models of any kind, prompts spread over ranks, results in order."""
