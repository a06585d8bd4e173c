"""Alignment: the element of B's symmetry group that brings B closest to A.

`align` poses one problem (A, B, the part of the symmetry that may move) and solves it by block coordinate descent over
spaces; every scope and every matcher goes through it. docs/architecture.md shows how data flow.
"""
