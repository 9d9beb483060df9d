"""Which uncertainty is worth referring by."""
