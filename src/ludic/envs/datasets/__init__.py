"""The built-in question sets as environments."""
