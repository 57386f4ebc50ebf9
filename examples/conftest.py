"""`downstream` is a project of its own, with settings of its own: nox -s downstream runs it, as its workflow says."""

collect_ignore = ["downstream"]
