"""Examples of the rules of zerofit/checking/rules/trainer/."""
