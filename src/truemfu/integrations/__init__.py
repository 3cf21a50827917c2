"""A place for the monitor in other trainers: one file per framework."""
