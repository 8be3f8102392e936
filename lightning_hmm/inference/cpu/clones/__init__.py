"""Compiled kernels for transitions between clones of symbols: states that emit one symbol each. The operator is `inference.cloned.Blocks`."""
