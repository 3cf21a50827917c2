"""One training step, kernel by kernel: where its time went, what limits it, what remedies could gain."""
