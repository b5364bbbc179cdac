"""Publishing a run's model: which files, with which card, and the upload to the hub."""
