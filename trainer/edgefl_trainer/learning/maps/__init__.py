"""Rollout maps as what a federation shares: choice, distillation, and how far prompts reach them."""
