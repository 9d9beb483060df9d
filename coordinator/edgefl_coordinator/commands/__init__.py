"""The operator's commands: options and printing, and `init`, which makes a coordinator's folder."""
