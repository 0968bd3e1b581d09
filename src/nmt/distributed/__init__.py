"""The processes of a training, the machine that they run on, and its devices."""
