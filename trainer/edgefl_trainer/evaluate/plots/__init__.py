"""Pictures as the bytes of a PNG: rounds of runs, figures of their sites, tables, confusions, partitions."""
