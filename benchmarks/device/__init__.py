"""What a device costs, and how often it answers, asks for a look or is wrong."""
