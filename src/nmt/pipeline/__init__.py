"""The six stages, and the engine that runs those that are out of date."""
