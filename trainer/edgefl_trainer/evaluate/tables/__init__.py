"""Tables of finished runs: their rows, what they look like as text, and the recall of each class."""
