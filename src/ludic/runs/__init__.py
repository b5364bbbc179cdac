"""What a run is: its settings, how it is put together and checked, its stages and its folder."""
