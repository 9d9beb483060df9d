"""What may leave a device, what would leave, and how it leaves."""
