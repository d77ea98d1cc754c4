"""``mindx-elastic report``: a run as one page. `run_history` reads what happened, `page` shows it."""
