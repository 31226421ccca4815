"""Carries the patches of one line over to another upstream release and says, per patch, what became of it."""
