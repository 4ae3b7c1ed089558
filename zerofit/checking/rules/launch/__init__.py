"""Rules about launch flags and the machines that they name."""
