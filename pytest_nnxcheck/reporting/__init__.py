"""Messages, summaries, reports and the memory baseline, made from plain data alone."""
