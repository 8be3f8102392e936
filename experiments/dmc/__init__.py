"""Experiments of Siddiqi and Moore (2005), DMC HMM."""
