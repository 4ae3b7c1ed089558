"""Rules about TrainingArguments."""
