"""The commands of `edgefl-export`, one file each: options and printing."""
