"""One file per group of related model types; each lists its records as `FAMILIES`."""
