"""Pictures in, checked and resized; what is said about one picture out."""
