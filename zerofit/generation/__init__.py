"""Generation on all ranks in step: any model, prompts distributed over ranks, results in order."""
