"""A finished run as one page to keep or to print: what was learned, from whom, how well, and what left the sites."""
