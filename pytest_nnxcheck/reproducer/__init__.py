"""The program to paste: the layers that ran, the user's own test, and what looks for the finding."""
