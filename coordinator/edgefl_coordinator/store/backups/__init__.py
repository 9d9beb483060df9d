"""A backup of the store: one moment held still, the file of it, and rows and blobs from one place to another."""
