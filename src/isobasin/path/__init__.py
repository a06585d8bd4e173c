"""The straight path between two models: metrics along it, its barrier, and which components cause the barrier."""
