"""Matching: which element of a model's symmetry group brings it closest to another model."""
