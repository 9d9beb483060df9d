"""How a site learns without labels: contrast, feature banks, a whole network by SGD."""
