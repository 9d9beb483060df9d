"""Where payloads too large for a row of the database lie."""
