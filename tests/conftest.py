"""Its place makes `tiny` and `oracle` importable from every folder of tests, whichever is run alone."""
