"""What was learned is judged: figures of a run and of its held-out sites, thresholds, other rows, photographs."""
