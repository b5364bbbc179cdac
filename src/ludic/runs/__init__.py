"""What a run is: its settings, assembling it, its stages, its folder."""
