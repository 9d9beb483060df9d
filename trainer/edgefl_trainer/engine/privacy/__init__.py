"""What noise has cost: the ledger of each site of a run."""
