"""Carrying a run out: its checks, its pieces, its stages, its ranks, its end."""
