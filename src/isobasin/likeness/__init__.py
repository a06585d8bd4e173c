"""How alike two models are once their symmetries are taken away: distances, canonical points, fingerprints."""
