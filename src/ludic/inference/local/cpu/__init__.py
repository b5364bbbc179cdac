"""The in-process engine on a CPU: fixed shapes, so that results repeat to the bit."""
