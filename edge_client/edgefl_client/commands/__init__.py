"""The commands of `edgefl`, one file each: options and printing, nothing else."""
