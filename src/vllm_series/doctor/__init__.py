"""`series doctor`: what an environment and its machine give to the features."""
