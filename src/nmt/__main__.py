"""`python -m nmt`: what torchrun starts."""

from nmt.cli import main

main()
