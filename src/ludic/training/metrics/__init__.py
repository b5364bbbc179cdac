"""What a run measures of itself, and the loggers that write it down."""
