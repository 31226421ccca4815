"""`series install`: the built wheel, or the patched files over an installed upstream wheel, and back."""
