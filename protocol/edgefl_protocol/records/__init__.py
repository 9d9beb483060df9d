"""Small signed records: clock, index, root set, revoked keys, changes of keys, invites."""
