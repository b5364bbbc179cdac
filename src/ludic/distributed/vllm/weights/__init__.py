"""Publishing whole weights: staged beside the old ones, checked, and applied in a short pause."""
