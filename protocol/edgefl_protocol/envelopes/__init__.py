"""Keys, and messages that are signed by one key and sealed for another."""
