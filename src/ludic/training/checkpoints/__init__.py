"""Saving a whole training state, and taking it up again."""
