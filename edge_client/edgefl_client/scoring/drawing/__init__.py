"""The picture of a score or of an answer: photo, map and caption."""
