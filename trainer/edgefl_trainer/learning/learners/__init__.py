"""What learns at one site, for methods that do not ask what it is: prompts of a frozen network, or an answer model."""
