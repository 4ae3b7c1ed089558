"""What DeepSpeed needs before it makes its engine."""
