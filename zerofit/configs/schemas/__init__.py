"""The keys that DeepSpeed, accelerate and transformers read, by release."""
