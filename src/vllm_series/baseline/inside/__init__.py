"""Scripts that run inside a line's torch environment; they import nothing of this project."""
