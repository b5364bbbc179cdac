"""What every room uses and no user imports: names looked up, text and JSON cleaned, precision,
checksums, tracebacks. It imports nothing of the package but its types and errors."""
