"""Work of many requests side by side: in one thread, and in processes for cryptography."""
