"""``python -m psamil``."""

from psamil.cli import main

main()
