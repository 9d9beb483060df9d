"""What each route carries: typed values to and from a `Payload`."""
