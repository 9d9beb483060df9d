"""What `init` makes: a new coordinator's folder, and the task of its federation."""
