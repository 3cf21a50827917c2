"""Fault injection: everything a run, a folder, a name or a network peer can do to truemfu, tried with a seed.

    python -m faults                       every attack; the table of docs/promises.md
    python -m faults --short               a sample of each family, as the tests run it
    python -m faults --only names:17       one attack again, with what it printed

An attack is a function that gets an empty folder. It runs in a process forked from this one, which has torch
and truemfu loaded. It has got through if it raises, prints a traceback or takes too long.
"""
