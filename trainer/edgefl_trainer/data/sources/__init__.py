"""One module for each kind of data SPEC, and how they read files, folders, zips and tables."""
