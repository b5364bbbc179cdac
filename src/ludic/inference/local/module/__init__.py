"""The module that the engine serves: seen a second time without a copy, and held to what it
computes itself before the first request."""
