"""Servers that speak the OpenAI API."""
