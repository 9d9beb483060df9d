"""What the coordinator keeps: tables, blobs, audit log, keys, published bundles."""
