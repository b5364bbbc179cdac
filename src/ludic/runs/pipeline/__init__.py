"""A run over Redis: its address, its actors, its trainer, its state."""
