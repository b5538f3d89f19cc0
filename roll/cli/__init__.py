"""The commands of `roll`."""
