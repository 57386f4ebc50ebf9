"""What is said, made from plain data alone: messages, summaries, reports and the memory baseline."""
