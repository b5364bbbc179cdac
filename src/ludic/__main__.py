"""`python -m ludic`, which is also what `torchrun -m ludic` starts on every rank."""

from ludic.cli import main

main()
