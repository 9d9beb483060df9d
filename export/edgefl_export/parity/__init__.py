"""Gates: a graph computes what the trainer's PyTorch code computes, or there is no bundle."""
