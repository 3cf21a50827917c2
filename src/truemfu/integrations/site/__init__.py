"""The folder that `truemfu run` puts first on PYTHONPATH; every Python started from there runs its file."""
