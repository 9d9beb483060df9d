"""From a finished run to the members of a bundle."""
