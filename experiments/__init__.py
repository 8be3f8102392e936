"""The tables and figures of the papers, ours beside theirs: ``python -m experiments.<model>.<experiment>``."""
