"""The tables of the papers as experiments: read from `experiments/*.toml`, run, and set beside the printed numbers."""
