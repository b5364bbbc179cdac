"""Tools for working on this repository; they are not part of the `ludic` package."""
