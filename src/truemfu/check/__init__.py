"""A second opinion on somebody's MFU or TFLOP/s: computed again, and explained where it differs.

logged.py       what was logged, to the digits that were printed
readers.py      the same, from the log of another tool
conventions.py  FLOPs of a token as tools count them
choices.py      what else decides the figure: the peak, the devices, the time, the tokens
verdict.py      which choices give the logged figure within its rounding
texts.py        a verdict as sentences and as JSON
"""
