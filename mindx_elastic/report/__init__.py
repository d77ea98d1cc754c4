"""``mindx-elastic report``: a run as one page. `story` reads what happened, `page` and `drawing` show it."""
