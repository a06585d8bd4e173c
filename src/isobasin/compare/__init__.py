"""Comparison of two models modulo symmetry: equivalence, distance, canonical points and fingerprints."""
