"""Environments of other packages, each under its package's name, each behind an extra.

A module here imports its package when an environment is made, and not before.
"""
