"""Speed and memory of training, beside plain PyTorch and beside peers."""
