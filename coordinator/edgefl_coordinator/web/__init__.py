"""HTTPS in: guard, sealed routes, the serving process and its administration socket."""
