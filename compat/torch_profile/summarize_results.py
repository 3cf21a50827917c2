"""The original command line of the summary; `truemfu summarize --help` explains its flags.

python summarize_results.py --logs-dir=logs --output=results.json
"""

import sys

from profiling_script import truemfu

if __name__ == "__main__":
    truemfu("summarize", *sys.argv[1:])
