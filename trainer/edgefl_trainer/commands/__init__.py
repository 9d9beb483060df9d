"""The commands of `edgefl-train`, one file each: options and printing, nothing else."""
