"""The FLOPs of each step: observed, fitted from observed steps, or unknown with the reason."""
