"""Entry point of ``python -m lightning_hmm``."""

from lightning_hmm.cli import run

if __name__ == "__main__":
    run()
