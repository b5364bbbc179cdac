"""interaction."""
