"""8-bit scoring graphs: the pictures they are made with, the layers that stay in float, and their gate."""
