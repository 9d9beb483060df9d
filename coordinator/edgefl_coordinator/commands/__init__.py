"""The operator's commands: options and printing."""
