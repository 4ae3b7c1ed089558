"""Examples of the rules of zerofit/checking/rules/deepspeed/."""
