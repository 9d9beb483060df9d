"""Load, bad networks, hostile members and hours of use of a coordinator."""
