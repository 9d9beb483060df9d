"""Several processes of this machine that work on sites side by side."""
