"""Networks: the frozen backbone with prefix prompts, the evidential head and the one definition of a score."""
