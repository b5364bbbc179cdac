"""What a run came to, as figures, as a picture, and on a terminal."""
