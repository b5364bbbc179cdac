"""What a run measures about itself, and the loggers that record it."""
