"""Who belongs to a federation: enrolment, keys over time, the blobs a member sends."""
