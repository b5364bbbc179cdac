"""Benchmarks: each module runs alone and prints its figures as JSON on its last line."""
