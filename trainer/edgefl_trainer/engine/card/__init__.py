"""What a run needs of a card: the memory of a step, and the batch that fits."""
