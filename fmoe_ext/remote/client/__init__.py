"""Use experts on other machines as modules to train through."""
