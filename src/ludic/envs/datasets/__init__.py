"""Question sets as environments: where their rows come from, and the built-in ones."""
