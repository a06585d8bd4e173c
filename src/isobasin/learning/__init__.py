"""Matching that learns: the group element that makes the path between two models low, found by descent."""
