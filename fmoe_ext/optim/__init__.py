"""Optimizers that know that a parameter may hold the matrices of many experts."""

from fmoe_ext.optim.muon import Muon, orthogonalize

__all__ = ["Muon", "orthogonalize"]
