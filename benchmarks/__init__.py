"""Figures against peers, each printed by one script in one run, as ratios."""
