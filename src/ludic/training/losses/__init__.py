"""What losses are made of: aggregation, policy ratios, KL, corrections, sums of losses."""
