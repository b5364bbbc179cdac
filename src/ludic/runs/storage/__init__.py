"""What a run leaves on disk: its folder, who may write there, its rollouts."""
