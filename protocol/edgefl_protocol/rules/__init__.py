"""Rules that two sides must compute alike, written once: numpy in, numpy out; no file, no clock."""
