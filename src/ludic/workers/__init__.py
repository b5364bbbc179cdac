"""Threads and processes for code that blocks or must be killable."""
