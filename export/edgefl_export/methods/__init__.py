"""What of each method a device needs for learning it: its training graph, its record and its gate's reference."""
