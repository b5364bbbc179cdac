"""Who plays in a run besides the policy: teachers, opponents."""
