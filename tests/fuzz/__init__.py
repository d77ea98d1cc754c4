"""Programs made by chance, and stopped by chance: `write` makes the program of a seed, `play` runs it."""
