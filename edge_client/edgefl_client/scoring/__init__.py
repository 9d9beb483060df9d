"""From a picture to a score, a heat map and a line in the log."""
