"""A run as a page that people read: HTML, and Markdown."""
