"""One member among many: what bounds its claims and its updates, and robust centres of what all sent."""
