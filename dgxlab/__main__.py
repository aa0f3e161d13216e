"""`python -m dgxlab`."""

from dgxlab.cli import main

main()
