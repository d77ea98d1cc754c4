"""Where the training stands in its loops: `loops` yields what is left, and makes a resumed program go on at its place.

`loaders` has the loaders that count, and `loader_watch` sees those that were not named. `between_steps` puts back what
a program changes on its way to the resumed place, names what moves between two steps, and keeps an evaluation out of
the training. `own_loop` refuses those that never ask.
"""
